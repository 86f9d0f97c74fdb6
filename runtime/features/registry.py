"""The features, a line for each. `runtime.asks` lists what requests ask of them."""

from pathlib import Path

from runtime.features.feature import Feature
from runtime.features.images.feature import ImagesFeature
from runtime.features.reasoning.feature import ReasoningFeature
from runtime.frontend.pictures import Sight
from runtime.models.tokenizer import Tokenizer

FEATURES: tuple[Feature, ...] = (ReasoningFeature(), ImagesFeature())


def open_sight(path: Path, tokenizer: Tokenizer) -> Sight | None:
    """How the model in a directory sees images; None: it does not. Raises ModelError."""
    found = (feature.sight(path, tokenizer) for feature in FEATURES)
    return next((sight for sight in found if sight is not None), None)
