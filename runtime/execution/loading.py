"""Loading a model onto a device: its weights as floats, or as codes where a product with them exists."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from runtime.config import ModelConfig
from runtime.execution.coded_products import CodedTensor, coded_tensor
from runtime.execution.mixers.attention import Attention
from runtime.execution.ops import Ops
from runtime.execution.sizing import check_weights
from runtime.execution.torch_decoder import TorchDecoder
from runtime.models.coded import CodedWeight
from runtime.models.published import PublishedTensors
from runtime.models.shards import Shard, split_spec
from runtime.models.spec import DecoderSpec
from runtime.models.tensor_files import find_files
from runtime.models.weights import (
    StoredTensors,
    codes_directory,
    load_vectors,
    load_weights,
    open_stored,
    places,
    random_weights,
    runs_of,
)

log = logging.getLogger("ramet.engine")


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
    size = shard.size if shard else 1
    share = split_spec(spec, size) if shard else spec
    if config.random_weights:
        check_weights(spec, dtype, device, size)
        return LoadedModel(TorchDecoder(share, random_weights(spec, dtype, device, shard), device, ops))
    keeps_codes = config.quantization == config.dtype == "auto"
    tensors = open_stored(path, spec)
    if isinstance(tensors, PublishedTensors) and keeps_codes and shard is None and _has_products(spec, dtype, device):
        check_weights(spec, dtype, device, needed=sum(file.stat().st_size for file in find_files(path)))
        return load_products(tensors, spec, device, ops)
    check_weights(spec, dtype, device, size)
    keeps_codes &= is_native
    quantization = "none"
    if isinstance(tensors, PublishedTensors):
        every, exact = tensors.count()
        exact = exact if keeps_codes and spec.latent is None else 0
        _report(tensors, exact, every)
        quantization = tensors.name if exact else f"{tensors.name}, unpacked"
        keeps_codes &= exact > 0
    elif tensors is not None and keeps_codes:
        quantization = tensors.name
    if tensors is not None and keeps_codes:
        model = TorchDecoder(share, load_vectors(tensors, spec, dtype), device, ops, keeps_codes)
        return LoadedModel(model, quantization, (tensors, codes_directory(tensors, path)))
    if keeps_codes and spec.experts is not None and spec.experts.packed:
        quantization = "mxfp4"
    return LoadedModel(
        TorchDecoder(share, load_weights(path, spec, dtype, shard), device, ops, keeps_codes), quantization
    )


def _report(tensors: PublishedTensors, exact: int, every: int) -> None:
    log.info("%s: %d of %d quantised matrices are computed as stored, the others unpacked", tensors.name, exact, every)


def _has_products(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> bool:
    others = spec.experts or spec.latent or spec.recurrent
    return device.type == "cuda" and dtype == torch.bfloat16 and not others


def load_products(tensors: PublishedTensors, spec: DecoderSpec, device: torch.device, ops: Ops) -> LoadedModel:
    """A model in bfloat16 whose matrices stay quantised where `coded_tensor` has a product. Raises ModelError."""
    names, every = list(spec.expected_tensors()), places(spec)
    counts, told = [0, 0], set[type[CodedTensor]]()

    def matrix(rows: torch.Tensor, is_table: bool = False) -> torch.Tensor:
        """The matrix of rows at these places, [n, 1]; a table has its rows read, for which it must be unpacked."""
        runs = runs_of(rows[:, 0].cpu().numpy(), names)
        parts = [part.rows(numbers) for name, numbers in runs if (part := tensors.coded(name)) is not None]
        whole = CodedWeight.stacked(parts) if len(parts) == len(runs) and not is_table else None
        found = None if whole is None else coded_tensor(whole, device, told)
        counts[isinstance(found, CodedTensor)] += bool(parts)
        if found is not None:
            return found
        floats = [tensors.read(name, torch.bfloat16)[torch.from_numpy(numbers)] for name, numbers in runs]
        return torch.cat(floats).to(device)

    model = TorchDecoder(spec, load_vectors(tensors, spec, torch.bfloat16), device, ops)
    for layer in tqdm(model.layers, desc="loading", unit="layer", disable=None):
        assert isinstance(layer.mixer, Attention)
        layer.mixer.inputs, layer.o = matrix(layer.mixer.inputs), matrix(layer.o)
        layer.gate_up, layer.down = matrix(layer.gate_up), matrix(layer.down)
    model.embedding = matrix(every["model.embed_tokens.weight"], is_table=True)
    model.head = model.embedding if spec.tie_embeddings else matrix(every["lm_head.weight"])
    _report(tensors, counts[1], sum(counts))
    return LoadedModel(model, tensors.name if counts[1] else f"{tensors.name}, unpacked")
