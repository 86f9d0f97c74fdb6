"""The features, a line for each. `runtime.asks` lists what requests ask of them."""

from runtime.features.chunks.feature import ChunksFeature
from runtime.features.feature import Feature
from runtime.features.reasoning.feature import ReasoningFeature

FEATURES: tuple[Feature, ...] = (ChunksFeature(), ReasoningFeature())
