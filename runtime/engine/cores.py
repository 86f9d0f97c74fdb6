"""Which engine core a model needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runtime.config import Config
from runtime.engine.core import EngineCore
from runtime.engine.denoise_core import DiffusionCore
from runtime.models.spec import ModelSpec


def open_core(config: Config, path: Path, quotas: Mapping[str, int] | None = None) -> EngineCore:
    """The core for the model directory `path`; `quotas`: cached pages by tenant. Raises ModelError."""
    kind = EngineCore if ModelSpec.load(path).diffusion is None else DiffusionCore
    return kind(config, path, quotas)
