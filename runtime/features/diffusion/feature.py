"""The door of diffusion models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import ModelError
from runtime.features.feature import Feature, Opening

if TYPE_CHECKING:
    from runtime.config import Config
    from runtime.features.diffusion.bicache.strategy import BiCache
    from runtime.features.diffusion.blocks import BlockPrefix
    from runtime.features.diffusion.decoding import CanvasDecoding
    from runtime.features.diffusion.preparer import CanvasPreparer, CausalPreparer
    from runtime.frontend.preparer import ServedModel


def unusable(config: Config, is_diffusion: bool) -> str | None:
    """The name of an option that is set but has no effect on such a model; None if there is none."""
    if is_diffusion:
        return None if config.cache.reuse in ("auto", "none") else f"reuse {config.cache.reuse}"
    return next((name.replace("_", "-") for name, value in config.diffusion if value is not None), None)


class DiffusionFeature(Feature):
    """Models that decide the masks of a canvas in place of next tokens, and share prefixes by BiCache or by blocks."""

    def __init__(self, config: Config, path: Path):
        from runtime.models.config_json import read_json
        from runtime.models.implementation import is_diffusion_gemma, own_spec

        spec = own_spec(config.model, path)
        is_diffusion = is_diffusion_gemma(read_json(path / "config.json")) if spec is None else bool(spec.diffusion)
        if given := unusable(config, is_diffusion):
            raise ModelError(f"--{given}: {path.name} is {'a diffusion' if is_diffusion else 'a causal'} model")
        if config.diffusion.depth_table is not None and spec is not None:
            from runtime.features.diffusion.bicache.depth_table import read_table

            read_table(config.diffusion.depth_table, spec)

    def default(self, opening: Opening) -> BiCache | BlockPrefix | None:
        """Sets `opening.info.decoding`."""
        executor, cache, spec = opening.executor, opening.cache, opening.executor.spec
        if spec.diffusion is None:
            return None
        from runtime.features.diffusion.bicache.strategy import BiCache
        from runtime.features.diffusion.blocks import BlockPrefix, CanvasPrefix

        strategy: BlockPrefix | BiCache
        if spec.diffusion.attended is not None:
            kind = CanvasPrefix if executor.decoder.soften else BlockPrefix
            strategy = kind(cache, spec.num_layers, spec.diffusion)
        else:
            strategy = BiCache.load(opening.config, opening.path, spec, cache)
        opening.info.decoding = strategy.info
        return strategy

    def decoding(self, opening: Opening) -> CanvasDecoding | None:
        executor, spec = opening.executor, opening.executor.spec
        if spec.diffusion is None:
            return None
        from runtime.features.diffusion.decoding import CanvasDecoding

        return CanvasDecoding(spec.diffusion, executor.device, spec.vocab_size, executor.decoder.soften)

    @staticmethod
    def preparer(served: ServedModel) -> CanvasPreparer | CausalPreparer:
        from runtime.features.diffusion.preparer import CanvasPreparer, CausalPreparer

        return CausalPreparer() if served.info.decoding is None else CanvasPreparer(served, served.info.decoding)
