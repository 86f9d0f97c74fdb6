"""The door of diffusion models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from runtime.errors import ModelError
from runtime.features.feature import Feature, Opening

if TYPE_CHECKING:
    from runtime.config import Config
    from runtime.features.diffusion.bicache.strategy import BiCache
    from runtime.features.diffusion.blocks import BlockPrefix
    from runtime.features.diffusion.decoding import CanvasDecoding
    from runtime.features.diffusion.noise import Soften
    from runtime.features.diffusion.preparer import CanvasPreparer, RefusingPreparer
    from runtime.features.diffusion.published import DiffusionSpec
    from runtime.frontend.preparer import ServedModel


def unusable(config: Config, is_diffusion: bool) -> str | None:
    """The name of an option that is set but has no effect on such a model; None if there is none."""
    if is_diffusion:
        return None if config.cache.reuse in ("auto", "none") else f"reuse {config.cache.reuse}"
    return next((name.replace("_", "-") for name, value in config.diffusion if value is not None), None)


class DiffusionFeature(Feature):
    """Models that decide the masks of a canvas in place of next tokens, and share prefixes by BiCache or by blocks."""

    counters: ClassVar[Mapping[str, tuple[str, str]]] = {
        "denoise_steps": ("ramet:denoise_steps", "Denoising steps of all requests"),
        "refreshes": ("ramet:prefix_refreshes", "Denoising steps that refreshed a shared prefix"),
        "divergences": ("ramet:divergences", "Measurements of the divergence caused by a reused prefix"),
        "divergences_exceeded": ("ramet:divergences_exceeded", "Measurements of divergence above the bound"),
    }

    def __init__(self, config: Config, path: Path):
        from runtime.models.config_json import read_json
        from runtime.models.implementation import is_diffusion_gemma, own_spec

        model = own_spec(config.model, path)
        is_causal = not is_diffusion_gemma(read_json(path / "config.json")) if model is None else model.causal
        if given := unusable(config, not is_causal):
            raise ModelError(f"--{given}: {path.name} is {'a causal' if is_causal else 'a diffusion'} model")
        self._spec: DiffusionSpec | None = None
        if not is_causal:
            from runtime.features.diffusion.published import read_spec

            self._spec = read_spec(path)
        if config.diffusion.depth_table is not None and model is not None:
            from runtime.features.diffusion.bicache.depth_table import read_table

            read_table(config.diffusion.depth_table, model)

    def default(self, opening: Opening) -> BiCache | BlockPrefix | None:
        """Sets `opening.info.decoding`."""
        if (spec := self._spec) is None:
            return None
        cache, model = opening.cache, opening.executor.spec
        from runtime.features.diffusion.bicache.strategy import BiCache
        from runtime.features.diffusion.blocks import BlockPrefix, CanvasPrefix

        strategy: BlockPrefix | BiCache
        if spec.attended is None:
            strategy = BiCache.load(opening, spec)
        elif _soften(opening) is None:
            strategy = BlockPrefix(cache, model.num_layers, spec)
        else:
            strategy = CanvasPrefix(cache, model.num_layers, spec, model.hidden_size)
        opening.info.decoding = strategy.info
        return strategy

    def decoding(self, opening: Opening) -> CanvasDecoding | None:
        if self._spec is None:
            return None
        from runtime.features.diffusion.decoding import CanvasDecoding

        executor = opening.executor
        return CanvasDecoding(self._spec, executor.device, executor.spec.vocab_size, _soften(opening))

    @staticmethod
    def preparer(served: ServedModel) -> CanvasPreparer | RefusingPreparer:
        from runtime.features.diffusion.preparer import CanvasPreparer, RefusingPreparer

        return RefusingPreparer() if served.info.decoding is None else CanvasPreparer(served, served.info.decoding)


def _soften(opening: Opening) -> Soften | None:
    """How the model makes soft embeddings; None: it is not DiffusionGemma, which transformers' code computes."""
    soften: Soften | None = getattr(opening.executor.decoder.model, "soften", None)
    return soften
