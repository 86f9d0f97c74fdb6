"""The features, a line for each. `runtime.asks` lists what requests ask of them."""

from runtime.features.adapters.feature import AdaptersFeature
from runtime.features.diffusion.feature import DiffusionFeature
from runtime.features.drafts.feature import DraftsFeature
from runtime.features.feature import Feature
from runtime.features.hybrid.feature import HybridFeature
from runtime.features.kv_events.feature import KVEventsFeature
from runtime.features.next_turn.feature import NextTurnFeature
from runtime.features.reasoning.feature import ReasoningFeature
from runtime.features.tiers.feature import TiersFeature
from runtime.features.windows.feature import WindowsFeature

FEATURES: tuple[type[Feature], ...] = (
    HybridFeature,
    WindowsFeature,
    DiffusionFeature,
    ReasoningFeature,
    AdaptersFeature,
    TiersFeature,
    NextTurnFeature,
    DraftsFeature,
    # Last, as it publishes what the others have done.
    KVEventsFeature,
)
