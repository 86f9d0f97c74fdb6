"""The features, a line for each. `runtime.asks` lists what requests ask of them."""

from pathlib import Path

from runtime.features.adapters.feature import AdaptersFeature
from runtime.features.chunks.feature import ChunksFeature
from runtime.features.diffusion.feature import DiffusionFeature
from runtime.features.drafts.feature import DraftsFeature
from runtime.features.feature import Feature
from runtime.features.hybrid.feature import HybridFeature
from runtime.features.images.feature import ImagesFeature
from runtime.features.kv_events.feature import KVEventsFeature
from runtime.features.next_turn.feature import NextTurnFeature
from runtime.features.reasoning.feature import ReasoningFeature
from runtime.features.tiers.feature import TiersFeature
from runtime.features.windows.feature import WindowsFeature
from runtime.frontend.pictures import Sight
from runtime.models.tokenizer import Tokenizer

FEATURES: tuple[type[Feature], ...] = (
    HybridFeature,
    WindowsFeature,
    DiffusionFeature,
    ChunksFeature,
    ReasoningFeature,
    AdaptersFeature,
    TiersFeature,
    ImagesFeature,
    NextTurnFeature,
    DraftsFeature,
    # Last, as it publishes what the others have done.
    KVEventsFeature,
)


def open_sight(path: Path, tokenizer: Tokenizer) -> Sight | None:
    """How the model in a directory sees images; None: it does not. Raises ModelError."""
    found = (feature.sight(path, tokenizer) for feature in FEATURES)
    return next((sight for sight in found if sight is not None), None)
