"""Loading a model whose weights are quantised: as codes where a product with them exists, else unpacked."""

import logging

import torch
from tqdm import tqdm

from runtime.execution.coded_products import CodedTensor, coded_tensor
from runtime.execution.loading import LoadedModel, Loading
from runtime.execution.mixers.attention import Attention
from runtime.execution.ops import Ops
from runtime.execution.sizing import check_weights
from runtime.execution.torch_decoder import TorchDecoder
from runtime.models.coded import CodedWeight
from runtime.models.published import PublishedTensors
from runtime.models.spec import DecoderSpec
from runtime.models.stored import codes_directory, load_vectors, open_stored, places, runs_of
from runtime.models.tensor_files import find_files

log = logging.getLogger("ramet.engine")


def load_quantized(given: Loading) -> LoadedModel:
    """As `load_model`, for a directory that `holds_codes`. Raises ModelError."""
    spec, dtype, device, keeps_codes = given.spec, given.dtype, given.device, given.keeps_codes
    tensors = open_stored(given.path, spec)
    has_products = given.shard is None and _has_products(spec, dtype, device)
    if isinstance(tensors, PublishedTensors) and keeps_codes and has_products:
        check_weights(spec, dtype, device, needed=sum(file.stat().st_size for file in find_files(given.path)))
        return load_products(tensors, spec, device, given.ops)
    check_weights(spec, dtype, device, given.num_ranks)
    keeps_codes &= given.is_native
    quantization = "none"
    if isinstance(tensors, PublishedTensors):
        every, exact = tensors.count()
        exact = exact if keeps_codes and spec.latent is None else 0
        _report(tensors, exact, every)
        quantization = tensors.name if exact else f"{tensors.name}, unpacked"
        keeps_codes &= exact > 0
    elif keeps_codes:
        quantization = tensors.name
    if not keeps_codes:
        return LoadedModel(given.with_floats(), quantization)
    model = TorchDecoder(given.share, load_vectors(tensors, spec, dtype), device, given.ops, keeps_codes)
    return LoadedModel(model, quantization, (tensors, codes_directory(tensors, given.path)))


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
