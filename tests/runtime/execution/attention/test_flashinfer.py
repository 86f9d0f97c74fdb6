"""The path through FlashInfer: with a stand-in that does in torch what it documents, and with it on a GPU."""

import sys

import pytest
import torch

from runtime.batch import AttentionPlan
from runtime.execution.attention.flashinfer import FlashInferAttention
from runtime.execution.ops import FlashInferOps, Ops
from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding
from runtime.models.rope_spec import RopeSpec
from tests.runtime.execution.attention import dense
from tests.runtime.execution.attention.dense import dense_attention, random_plan
from tests.runtime.execution.attention.stand_in import Wrapper, stand_in
from tests.runtime.execution.attention.whole_engines import check_whole_engines

HEADS, KV_HEADS, DIM = 8, 2, 64
ROPE = RopeSpec(theta=10000.0)
HAS_GPU = torch.cuda.is_available()

DEVICES = [
    "stand-in",
    pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU and FlashInfer")),
]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cuda":
        return torch.device("cuda")
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in())
    return torch.device("cpu")


@pytest.fixture
def replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in())


class World(dense.World):
    """Over our backend."""

    def __init__(
        self,
        device: torch.device,
        page_size: int,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        heads: int = HEADS,
        dim: int = DIM,
    ):
        super().__init__(seed, 8192, page_size, KV_HEADS, dim, dtype, device)
        self.ours = FlashInferAttention(self.pool, self.rope, heads)

    def check(self, *plans: AttentionPlan) -> list:
        prepared = self.ours.prepare_step(plans)
        for plan, ready in zip(plans, prepared, strict=True):
            q = self.draw(plan.num_rows, self.ours.num_heads, self.pool.k.shape[-1])
            q = q.to(self.pool.k.device, torch.bfloat16)
            got = self.ours.run(ready, q, 0).cpu().double()
            wanted = dense_attention(plan, q, self.pool, self.rope)
            assert (got - wanted).norm() / wanted.norm() < 1e-2
        return prepared


def decode(world: World) -> AttentionPlan:
    plan = AttentionPlan(7)
    for row in range(7):
        world.causal(plan, slice(row, row + 1), 17 + 40 * row)
    return plan


def prefill(world: World) -> AttentionPlan:
    plan = AttentionPlan(7)
    world.causal(plan, slice(0, 5), 105)
    world.causal(plan, slice(5, 7), 2)
    return plan


def cascade(world: World) -> AttentionPlan:
    """Three levels: all share a root, some of them more; two of the rows are one request's."""
    plan = AttentionPlan(7)
    plan.add(slice(0, 7), world.span(320))
    plan.add(slice(0, 3), world.span(96))
    plan.add(slice(5, 7), world.span(48))
    for rows, length in ((slice(0, 1), 7), (slice(1, 3), 33), (slice(3, 4), 1), (slice(4, 5), 90), (slice(5, 7), 2)):
        world.causal(plan, rows, length)
    return plan


def bidirectional(world: World) -> AttentionPlan:
    plan = AttentionPlan(7)
    plan.add(slice(0, 4), world.span(131))
    plan.add(slice(4, 7), world.span(3))
    return plan


@pytest.mark.parametrize("seed", range(30))
def test_random_plans(device, seed):
    world = World(device, [1, 16][seed % 2], seed=seed)
    world.check(random_plan(world.pages, int(world.random.integers(1, 20)), 150))


def test_groups_of_a_step_do_not_share_wrappers(device):
    """All plans of a step are made before any of them is run."""
    world = World(device, 16)
    world.check(decode(world), cascade(world), bidirectional(world), decode(world))


def test_fp8_pages(device):
    world = World(device, 16, torch.float8_e4m3fn)
    world.check(cascade(world))


def test_one_level_takes_one_call_and_no_merge(replaced):
    world = World(torch.device("cpu"), 16)
    for kind in (decode, prefill, bidirectional):
        (ready,) = world.check(kind(world))
        assert ready.table is None
        assert len(ready.calls) == 1


def test_levels_take_two_calls_however_many_there_are(replaced):
    world = World(torch.device("cpu"), 16)
    (ready,) = world.check(cascade(world))
    assert [call.wrapper.plans[-1]["causal"] for call in ready.calls] == [False, True]
    assert [len(into.out) for into, _ in ready.merges] == [7, 3, 2]
    assert ready.table is None
    assert ready.calls[1].rows is None, "neighbours are not gathered"


def test_many_runs_of_rows_are_merged_by_one_kernel(replaced):
    world = World(torch.device("cpu"), 16)
    plan = cascade(world)
    plan.add(torch.tensor([0, 2, 4]), world.span(64))
    (ready,) = world.check(plan)
    assert ready.table.shape == (7, 4)
    assert not ready.merges


@pytest.mark.parametrize(("heads", "dim"), [(96, 128), (72, 256), (160, 64)])
def test_heads_are_merged_in_parts_that_a_block_of_threads_can_hold(device, heads, dim):
    world = World(device, 16, heads=heads, dim=dim)
    scattered = cascade(world)
    scattered.add(torch.tensor([0, 2, 4]), world.span(64))
    in_place, by_table = world.check(cascade(world), scattered)
    assert in_place.merges
    assert by_table.table is not None


def test_wrappers_are_made_once_and_share_the_workspace(replaced):
    world = World(torch.device("cpu"), 16)
    for _ in range(3):
        world.check(cascade(world), decode(world))
    assert len(Wrapper.made) == 3
    assert len({wrapper.workspace.data_ptr() for wrapper in Wrapper.made}) == 1
    assert not world.ours.workspace.any(), "the split kernels count in it from zero"


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_small_operations_are_torchs(device, dtype):
    ours, torchs = FlashInferOps(512), Ops()
    x, y, gate_up = (torch.randn(n).to(device, dtype) for n in ((5, 64), (5, 32), (5, 256)))
    weight, bias, norm = (torch.randn(n).to(device, dtype) for n in ((64, 32), (64,), (64,)))
    heads = torch.randn(5, 3, 64).to(device, dtype)
    close = {"atol": 3e-2, "rtol": 3e-2}
    for given in (x, heads):
        torch.testing.assert_close(ours.rms_norm(given, norm, 1e-5), torchs.rms_norm(given, norm, 1e-5), **close)
    torch.testing.assert_close(ours.silu_and_mul(gate_up), torchs.silu_and_mul(gate_up), **close)
    wanted = torchs.add_linear_norm(x.clone(), y, weight, bias, norm, 1e-5)
    for got, want in zip(ours.add_linear_norm(x.clone(), y, weight, bias, norm, 1e-5), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=6e-2, rtol=3e-2)


@pytest.mark.parametrize(
    "spec", [ROPE, RopeSpec(5e5, "llama3", 8.0, 64, 1.0, 4.0), RopeSpec(1e4, "yarn", 4.0, 128, amplitude=1.14)]
)
def test_rotation_by_position_is_torchs(device, spec):
    rope = RotaryEmbedding(spec, 64, device)
    positions = torch.tensor([500, 3, 77, 0, 511], device=device)
    # Strided, as queries and keys lie beside the values.
    qkv = torch.randn(5, 8, 64).to(device, torch.bfloat16)
    ours, torchs = FlashInferOps(512), Ops()
    wanted = torchs.rotate_qk(qkv[:, :6].clone(), 4, torchs.angles(rope, positions))
    for got, want in zip(ours.rotate_qk(qkv[:, :6], 4, ours.angles(rope, positions)), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_whole_engine_gives_torchs_tokens(tiny_dir, replaced, monkeypatch, overlap):
    check_whole_engines(tiny_dir, monkeypatch, step_tokens=24, cuda_graph_batches="0", overlap=overlap)
    plans = [plan for wrapper in Wrapper.made for plan in wrapper.plans]
    assert any(not plan.get("causal", True) for plan in plans), "nothing was shared"


def test_there_is_room_for_the_partial_results_of_large_graphs(replaced, monkeypatch):
    """FlashInfer's plan refuses a workspace with less than its tiles times heads times head_dim floats."""
    monkeypatch.setattr("runtime.execution.attention.flashinfer._WORKSPACE_BYTES", 128 << 20)
    pool = KVPool(1, 64, 16, 8, 128, torch.bfloat16, torch.device("cpu"))
    ours = FlashInferAttention(pool, RotaryEmbedding(ROPE, 128, torch.device("cpu")), 32)
    usual = len(ours.workspace)
    assert usual == 128 << 20
    ours.reserve(128, 128)
    assert len(ours.workspace) == usual
    ours.reserve(512, 512)
    tiles = 512 * 4 // 16 + 511
    assert len(ours.workspace) >= 32 * tiles * 16 * 128 * 4 > usual
    assert not ours.workspace.any()
