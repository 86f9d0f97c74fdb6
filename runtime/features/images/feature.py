"""The door of images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from runtime.features.feature import Feature
from runtime.models.config_json import architecture_of, read_json
from runtime.models.families import SEEING

if TYPE_CHECKING:
    from runtime.engine.core import EngineCore
    from runtime.features.images.part import ImagesPart
    from runtime.features.images.rules import Rules
    from runtime.frontend.preparer import Preparer, ServedModel


class ImagesFeature(Feature):
    """Images in prompts, of models that see."""

    counters: ClassVar[Mapping[str, tuple[str, str]]] = {
        "image_tiles": ("ramet:image_tiles", "Tiles of images that the vision tower has computed")
    }

    def parts(self, core: EngineCore) -> Iterable[ImagesPart]:
        path = Path(core.info.path)
        if (rules := _rules_of(path)) is None:
            return
        from runtime.features.images.part import ImagesPart
        from runtime.features.images.states import States
        from runtime.features.images.tower_process import open_tower

        config, executor = core.config.model, core.executor
        threads = core.config.engine.threads
        tower = open_tower(path, rules, executor.dtype, executor.device, config.random_weights, threads)
        yield ImagesPart(core, States(rules, tower))

    @staticmethod
    def preparer(served: ServedModel) -> Preparer | None:
        if (rules := _rules_of(served.path)) is None:
            return None
        from runtime.features.images.client import ModelSight
        from runtime.frontend.preparer import Preparer

        preparer = Preparer()
        preparer.sight = ModelSight(rules, served.tokenizer)
        return preparer


def _rules_of(directory: Path) -> Rules | None:
    """The rules of a model; None: it does not see. Raises ModelError."""
    if architecture_of(read_json(directory / "config.json")) not in SEEING:
        return None
    from runtime.features.images.rules import load_rules

    return load_rules(directory)
