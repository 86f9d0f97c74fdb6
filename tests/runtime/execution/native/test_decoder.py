"""A whole native step against `TorchDecoder.forward`, in every architecture."""

from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from runtime.batch import AdapterRows, AttentionPlan, ForwardBatch, HiddenRows, LayerGroup, Span, causal_visible
from runtime.execution.attention.torch_attention import Scores, TorchAttention
from runtime.execution.native.decoder import NativeDecoder
from runtime.execution.torch_decoder import TorchDecoder
from runtime.kv.pool import KVPool
from runtime.models.adapters.lora import LoraAdapter, LowRank
from runtime.models.spec import DecoderSpec
from runtime.models.weights import load_weights
from tests.runtime.execution.transformers.architectures import save_small
from tests.tiny import VOCAB

CPU = torch.device("cpu")
PAGE, PAGES = 4, 64


def make_model(path, storage, dtype=None):
    """A model whose weights are rounded to `storage` and computed with in `dtype`."""
    spec = DecoderSpec.load(path)
    weights = load_weights(path, spec, storage)
    return TorchDecoder(spec, {name: w.to(dtype or storage) for name, w in weights.items()}, CPU)


def make_pool(spec, dtype):
    pool = KVPool(spec.num_layers, PAGES, PAGE, spec.num_kv_heads, spec.head_dim, dtype, CPU, halves=spec.halves)
    torch.manual_seed(0)
    for tensor in (pool.k, pool.v):
        # Values that bfloat16 holds exactly, so that both pools begin alike.
        tensor.copy_(torch.randn(tensor.shape).bfloat16())
    return pool


def span(first, count, length, **options):
    return Span(np.arange(first, first + count, dtype=np.int32)[::-1].copy(), length, **options)


def slots_of(s, start):
    return [int(s.pages[i // PAGE]) * PAGE + i % PAGE for i in range(start, s.length)]


def mixed_batch(layers):
    """A prefill of 70 rows, one of 9 on top of 20, two decode rows that share a moved span with a hole."""
    torch.manual_seed(1)
    counts, lengths = [70, 9, 1, 1], [70, 29, 6, 13]
    tokens = torch.randint(0, VOCAB, (sum(counts),))
    positions = torch.cat(
        [torch.arange(length - n, length) + 40 * (n == 1) for n, length in zip(counts, lengths, strict=True)]
    )
    plan, slots, row, page = AttentionPlan(len(tokens)), [], 0, 0
    for count, length in zip(counts, lengths, strict=True):
        s = span(page, -(-length // PAGE), length)
        plan.add(slice(row, row + count), s, causal_visible(length, count))
        slots += slots_of(s, length - count)
        row, page = row + count, page + len(s.pages)
    keep = torch.ones(17, dtype=torch.bool)
    keep[3:6] = False
    plan.add(torch.tensor([79, 80]), span(page, 5, 17, shift=5, keep=keep))
    slots[75] = -1
    group = LayerGroup(range(layers), None, torch.tensor(slots), plan)
    return ForwardBatch(tokens, positions, [group], torch.tensor([69, 80, 3, 79]))


def fewer_rows_later(layers):
    """Twelve rows in the first layer, some of them in the rest."""
    torch.manual_seed(2)
    s = span(0, 3, 12)
    first = AttentionPlan(12)
    first.add(slice(0, 12), s, causal_visible(12, 12))
    alive = torch.tensor([1, 5, 6, 11])
    rest = AttentionPlan(4)
    rest.add(slice(0, 4), s, alive.numpy().astype(np.int32) + 1)
    slots = torch.tensor(slots_of(s, 0))
    groups = [
        LayerGroup(range(1), None, slots, first),
        LayerGroup(range(1, layers), alive, slots[alive], rest),
    ]
    return ForwardBatch(torch.randint(0, VOCAB, (12,)), torch.arange(12), groups, torch.tensor([11, 0, 5]))


@cache
def read_plainly(path, storage, make_batch):
    """A batch, and torch's logits and pool for it with the weights widened."""
    reference = make_model(path, storage, torch.float32)
    batch, pool = make_batch(reference.spec.num_layers), make_pool(reference.spec, torch.float32)
    return batch, reference.forward(batch, pool, TorchAttention(pool, reference.rope)), pool


@pytest.mark.parametrize(("make_batch", "threads"), [(mixed_batch, 2), (fewer_rows_later, 1)])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_every_architecture(library, any_tiny_dir, storage, threads, make_batch):
    """Close to torch: the arithmetic is float32 but for the roundings of `NativeDecoder`."""
    batch, wanted, pool = read_plainly(any_tiny_dir, storage, make_batch)
    model = make_model(any_tiny_dir, storage)
    native_pool = make_pool(model.spec, storage)
    got = NativeDecoder(library, model, native_pool, threads).forward(batch)
    # New keys and values are rounded to the pool's dtype; kernels that multiply pairs of bfloat16 round more.
    tolerance = 1e-5 if storage == torch.float32 else 3e-2
    assert _distance(got, wanted) < tolerance
    assert _distance(native_pool.k.float(), pool.k) < tolerance
    assert _distance(native_pool.v.float(), pool.v) < tolerance
    untouched = torch.ones(PAGE * PAGES, dtype=torch.bool)
    for group in batch.groups:
        untouched[group.kv_write[group.kv_write >= 0]] = False
    assert torch.equal(native_pool.k[:, untouched].float(), pool.k[:, untouched])


@pytest.fixture(scope="module")
def experts_dir(tmp_path_factory):
    return save_small("GptOss", tmp_path_factory.mktemp("experts"), vocab_size=VOCAB, num_experts_per_tok=3)


@pytest.mark.parametrize("make_batch", [mixed_batch, fewer_rows_later])
def test_experts_and_sinks(library, experts_dir, make_batch):
    """Among them states that a group is given, and those that it is asked for."""
    reference, model = (make_model(experts_dir, torch.float32) for _ in range(2))
    pools = [make_pool(reference.spec, torch.float32) for _ in range(2)]
    scores = [Scores(sinks=sinks) for sinks in reference.sinks()]
    native = NativeDecoder(library, model, pools[1], 2)
    forwards = [
        partial(reference.forward, pool=pools[0], backend=TorchAttention(pools[0], reference.rope, scores)),
        native.forward,
    ]
    found = []
    for forward in forwards:
        batch = make_batch(reference.spec.num_layers)
        given, asked = torch.ones(1, reference.spec.hidden_size), torch.zeros(2, reference.spec.hidden_size)
        batch.groups[0].load = [HiddenRows(torch.tensor([3]), given)]
        batch.groups[-1].save = [HiddenRows(torch.tensor([1, 5]), asked)]
        found.append((forward(batch).clone(), asked))
    for got, wanted in zip(found[1], found[0], strict=True):
        assert _distance(got, wanted) < 1e-5
    assert _distance(pools[1].k, pools[0].k) < 1e-5


def test_given_states_of_another_shape_are_refused(library, experts_dir):
    """The kernels would read beyond their end."""
    model = make_model(experts_dir, torch.float32)
    native, hidden = NativeDecoder(library, model, make_pool(model.spec, torch.float32), 2), model.spec.hidden_size
    for given in (torch.ones(1, 8), torch.ones(2, hidden), torch.ones(hidden), torch.ones(1, hidden).double()):
        batch = mixed_batch(model.spec.num_layers)
        batch.groups[0].load = [HiddenRows(torch.tensor([3]), given)]
        with pytest.raises(ValueError, match=r"must be contiguous float32 \(1, 32\), not torch"):
            native.forward(batch)


def make_adapter(spec, digest, rank):
    """A random adapter of every linear layer but those of keys, in values that bfloat16 holds exactly."""
    torch.manual_seed(rank)
    shapes = {name.removesuffix(".weight"): s for name, s in spec.expected_tensors().items() if "_proj.weight" in name}
    factors = {
        name: LowRank(
            (torch.randn(rank, inner) / inner**0.5).bfloat16().float(), torch.randn(out, rank).bfloat16().float()
        )
        for name, (out, inner) in shapes.items()
        if "k_proj" not in name
    }
    return LoraAdapter(digest, rank, factors)


@pytest.mark.parametrize("make_batch", [mixed_batch, fewer_rows_later])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_rows_with_adapters(library, ids_dir, storage, make_batch):
    """Ranks of 3 and 40 side by side, and rows without one before, between and behind them."""
    reference = make_model(ids_dir, storage, torch.float32)
    spec = reference.spec
    batch = make_batch(spec.num_layers)
    pool, native_pool = make_pool(spec, torch.float32), make_pool(spec, storage)
    native = NativeDecoder(library, make_model(ids_dir, storage), native_pool, 2)
    plain = reference.forward(batch, make_pool(spec, torch.float32), TorchAttention(pool, reference.rope))
    for digest, rank in (("a", 3), ("b", 40)):
        for model in (reference, native):
            model.load_adapter(make_adapter(spec, digest, rank))
    batch.adapters = [AdapterRows("a", 1, 5), AdapterRows("b", 6, len(batch.tokens) - 1)]
    wanted = reference.forward(batch, pool, TorchAttention(pool, reference.rope))
    assert _distance(plain, wanted) > 0.1
    tolerance = 1e-5 if storage == torch.float32 else 4e-2
    assert _distance(native.forward(batch), wanted) < tolerance
    assert _distance(native_pool.v.float(), pool.v) < tolerance


def test_steps_reuse_their_buffers(library, ids_dir):
    """A long step, a short one, then the long one again: nothing of one is seen in another."""
    model = make_model(ids_dir, torch.float32)
    spec = model.spec
    native_pool = make_pool(spec, torch.float32)
    native = NativeDecoder(library, model, native_pool, 2)
    long, short = mixed_batch(spec.num_layers), fewer_rows_later(spec.num_layers)
    first = native.forward(long).clone()
    native.forward(short)
    assert torch.equal(native.forward(long)[0], first[0])


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 0), *((torch.bfloat16, bits) for bits in (0, 4, 8))])
def test_steps_of_any_size_give_the_same_bits(library, ids_dir, dtype, bits):
    """A prompt at once, in which each thread goes alone, in chunks, and token by token."""
    if dtype == torch.bfloat16 and not library.multiplies_pairs:
        pytest.skip("of bfloat16, only pairs are summed in one order")
    length, tokens = 198, torch.randint(0, VOCAB, (198,), generator=torch.Generator().manual_seed(3))

    def run(steps):
        model = make_model(ids_dir, dtype)
        spec, pool, logits = model.spec, make_pool(model.spec, dtype), []
        native = NativeDecoder(library, model, pool, 2, bits)
        for start, stop in pairwise(steps):
            s, rows = Span(every_page[: -(-stop // PAGE)], stop), stop - start
            plan = AttentionPlan(rows)
            plan.add(slice(0, rows), s, causal_visible(stop, rows))
            group = LayerGroup(range(spec.num_layers), None, torch.tensor(slots_of(s, start)), plan)
            positions = torch.arange(start, stop)
            logits.append(
                native.forward(ForwardBatch(tokens[start:stop], positions, [group], positions - start)).clone()
            )
        return torch.cat(logits), pool.k, pool.v

    every_page = np.random.default_rng(0).permutation(PAGES).astype(np.int32)
    wanted = run([0, length])
    for steps in ([0, 100, 101, 107, length], range(0, length + 1, 9), range(length + 1)):
        for got, of in zip(run(list(steps)), wanted, strict=True):
            assert torch.equal(got, of)


def test_no_logits_wanted(library, ids_dir):
    model = make_model(ids_dir, torch.float32)
    native = NativeDecoder(library, model, make_pool(model.spec, torch.float32), 2)
    batch = fewer_rows_later(model.spec.num_layers)
    batch.logits_rows = torch.empty(0, dtype=torch.int64)
    assert native.forward(batch).shape == (0, model.spec.vocab_size)


def test_the_torch_weights_are_let_go(library, ids_dir):
    model = make_model(ids_dir, torch.float32)
    NativeDecoder(library, model, make_pool(model.spec, torch.float32), 1)
    assert not hasattr(model, "layers")
    assert not hasattr(model, "head")


def _distance(got, wanted):
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())
