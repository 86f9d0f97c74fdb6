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


@dataclass(frozen=True, slots=True)
class Loading:
    """What is to be loaded, and where to.

    Attributes:
        path: the model's directory.
        spec: the whole model.
        is_native: whether the kernels of a CPU compute it.
        shard: this rank's; None: there is one rank.
    """

    config: ModelConfig
    path: Path
    spec: DecoderSpec
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    is_native: bool
    shard: Shard | None = None

    @property
    def keeps_codes(self) -> bool:
        """Whether weights may be computed as they are stored."""
        return self.config.quantization == self.config.dtype == "auto"

    @property
    def num_ranks(self) -> int:
        return self.shard.size if self.shard else 1

    @property
    def share(self) -> DecoderSpec:
        """This rank's share of the model."""
        if self.shard is None:
            return self.spec
        from runtime.models.shards import split_spec

        return split_spec(self.spec, self.shard.size)

    def with_floats(self, keeps_packed: bool = False) -> TorchDecoder:
        """The model with its weights unpacked; `keeps_packed`: but for experts in MXFP4. Raises ModelError."""
        weights = load_weights(self.path, self.spec, self.dtype, self.shard)
        return TorchDecoder(self.share, weights, self.device, self.ops, keeps_packed)


def load_model(given: Loading) -> LoadedModel:
    """Load a model, or this rank's shard. Raises ModelError."""
    spec = given.spec
    check_weights(spec, given.dtype, given.device, given.num_ranks)
    if given.config.random_weights:
        weights = random_weights(spec, given.dtype, given.device, given.shard)
        return LoadedModel(TorchDecoder(given.share, weights, given.device, given.ops))
    is_packed = given.is_native and given.keeps_codes and spec.experts is not None and spec.experts.packed
    return LoadedModel(given.with_floats(is_packed), "mxfp4" if is_packed else "none")
