"""The features, a line for each. `runtime.asks` lists what requests ask of them."""

from runtime.features.adapters.feature import AdaptersFeature
from runtime.features.chunks.feature import ChunksFeature
from runtime.features.diffusion.feature import DiffusionFeature
from runtime.features.drafts.feature import DraftsFeature
from runtime.features.feature import Feature
from runtime.features.grammars.feature import GrammarsFeature
from runtime.features.hybrid.feature import HybridFeature
from runtime.features.images.feature import ImagesFeature
from runtime.features.kv_events.feature import KVEventsFeature
from runtime.features.next_turn.feature import NextTurnFeature
from runtime.features.reasoning.feature import ReasoningFeature
from runtime.features.tiers.feature import TiersFeature
from runtime.features.windows.feature import WindowsFeature
from runtime.frontend.preparer import Preparer, ServedModel

FEATURES: tuple[type[Feature], ...] = (
    HybridFeature,
    WindowsFeature,
    DiffusionFeature,
    ChunksFeature,
    ReasoningFeature,
    GrammarsFeature,
    AdaptersFeature,
    TiersFeature,
    ImagesFeature,
    NextTurnFeature,
    DraftsFeature,
    # Last, as it publishes what the others have done.
    KVEventsFeature,
)


def open_preparers(served: ServedModel) -> list[Preparer]:
    """What features do to submissions in the server's process. Raises ModelError."""
    found = (feature.preparer(served) for feature in FEATURES)
    return [preparer for preparer in found if preparer is not None]
