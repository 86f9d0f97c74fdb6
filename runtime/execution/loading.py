"""Loading a model onto a device, with its weights as floats, or experts in MXFP4. `quantized.py` has the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runtime.config import ModelConfig
from runtime.execution.ops import Ops
from runtime.execution.sizing import check_weights
from runtime.execution.torch_decoder import TorchDecoder
from runtime.models.spec import DecoderSpec
from runtime.models.weights import load_weights, random_weights

if TYPE_CHECKING:
    from runtime.models.shards import Shard
    from runtime.models.stored import StoredTensors


@dataclass(slots=True)
class LoadedModel:
    """A model with its weights.

    Attributes:
        quantization: `gguf`, `mxfp4` or `PublishedTensors.name` if weights are computed as they are stored, with
            `, unpacked` if none of a quantised checkpoint are; otherwise `none`.
        stored: tensors for `NativeDecoder`, and the directory of their codes.
    """

    model: TorchDecoder
    quantization: str = "none"
    stored: tuple[StoredTensors, Path] | None = None


def load_model(
    config: ModelConfig,
    path: Path,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    is_native: bool,
    shard: Shard | None = None,
) -> LoadedModel:
    """Load the model directory `path`, or this rank's shard.

    `is_native`: whether the kernels of a CPU compute it. Raises ModelError.
    """
    check_weights(spec, dtype, device, shard.size if shard else 1)
    share = spec
    if shard is not None:
        from runtime.models.shards import split_spec

        share = split_spec(spec, shard.size)
    if config.random_weights:
        return LoadedModel(TorchDecoder(share, random_weights(spec, dtype, device, shard), device, ops))
    keeps_codes = is_native and config.quantization == config.dtype == "auto"
    is_packed = keeps_codes and spec.experts is not None and spec.experts.packed
    model = TorchDecoder(share, load_weights(path, spec, dtype, shard), device, ops, keeps_codes)
    return LoadedModel(model, "mxfp4" if is_packed else "none")
