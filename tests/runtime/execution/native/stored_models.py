"""Models that the kernels compute as they are stored, beside the same weights unpacked."""

import torch

from runtime.batch import AdapterRows
from runtime.execution.attention.torch_attention import TorchAttention
from runtime.execution.native.decoder import NativeDecoder
from runtime.execution.torch_decoder import TorchDecoder
from runtime.models.spec import DecoderSpec
from runtime.models.stored import load_vectors, open_stored
from runtime.models.weights import load_weights
from tests.runtime.execution.native.test_decoder import CPU, make_adapter, make_pool, mixed_batch


def make_native(library, directory, dtype=torch.float32):
    spec = DecoderSpec.load(directory)
    tensors = open_stored(directory, spec)
    model, pool = TorchDecoder(spec, load_vectors(tensors, spec, dtype), CPU), make_pool(spec, dtype)
    return NativeDecoder(library, model, pool, 2, stored=(tensors, directory)), pool


def make_reference(unpacked, num_tokens):
    """The model in torch, a step over tokens below `num_tokens`, and its pool."""
    spec = DecoderSpec.load(unpacked)
    batch, pool = mixed_batch(spec.num_layers), make_pool(spec, torch.float32)
    batch.tokens %= num_tokens
    return TorchDecoder(spec, load_weights(unpacked, spec, torch.float32), CPU), batch, pool


def check_near_unpacked(library, stored, unpacked, num_tokens, most, most_values):
    """Relative errors are at most these, as activations are rounded to 8 bits; and a row has one result, to the bit."""
    reference, batch, pool = make_reference(unpacked, num_tokens)
    wanted = reference.forward(batch, pool, TorchAttention(pool, reference.rope))
    for _ in range(2):  # packed, and mapped
        native, native_pool = make_native(library, stored)
        got = native.forward(batch).clone()
        assert 0 < (got - wanted).norm() / wanted.norm() < most
        assert (native_pool.v - pool.v).norm() / pool.v.norm() < most_values
        rows = batch.logits_rows.clone()
        batch.logits_rows = rows[[2]]
        assert torch.equal(native.forward(batch), got[[2]])
        batch.logits_rows = rows


def logits_with_an_adapter(library, stored, unpacked, num_tokens):
    """Of a step: as stored without the adapter, as stored with it, and by the reference with it."""
    reference, batch, pool = make_reference(unpacked, num_tokens)
    native, _ = make_native(library, stored)
    plain = native.forward(batch).clone()
    for model in (reference, native):
        model.load_adapter(make_adapter(reference.spec, "a", 5))
    batch.adapters = [AdapterRows("a", 2, len(batch.tokens))]
    wanted = reference.forward(batch, pool, TorchAttention(pool, reference.rope))
    return plain, native.forward(batch), wanted
