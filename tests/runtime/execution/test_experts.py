"""Every way of computing experts in torch gives the sum over each row's experts, in few operations."""

import math
import shutil
import sys

import pytest
import torch
import torch.nn.functional as F

from runtime.execution.experts import Experts
from runtime.execution.ops import Ops
from runtime.models.experts import ExpertSpec
from tests.runtime.execution.attention.stand_in import stand_in
from tests.runtime.execution.attention.whole_engines import check_whole_engines
from tests.runtime.execution.counting import Operations
from tests.runtime.execution.test_graphs import recorded
from tests.runtime.execution.transformers.architectures import save_small
from tests.tiny import WITH_TOKENIZER

COUNT, HIDDEN = 6, 48


def make(limit: float | None = None, inner: int = 40, dtype: torch.dtype = torch.float32) -> Experts:
    """Experts of Qwen3-MoE, or of gpt-oss if gates have a limit."""
    spec, draw = ExpertSpec((0,), COUNT, 2, inner, limit=limit, alpha=1.7), torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    weights = normal(COUNT, 2 * inner, HIDDEN).to(dtype), normal(COUNT, HIDDEN, inner).to(dtype)
    experts = Experts(spec, Ops(), normal(COUNT, HIDDEN), *weights)
    if limit is not None:
        experts.router_bias = normal(COUNT)
        experts.gate_up_bias, experts.down_bias = normal(COUNT, 2 * inner).to(dtype), normal(COUNT, HIDDEN).to(dtype)
    return experts


def rows(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


def one_by_one(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """Row by row and expert by expert, float32."""
    found = []
    for row, chosen, weights in zip(x, *experts.choose(x), strict=True):
        total = torch.zeros(HIDDEN)
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            gate, up = (experts.gate_up[expert].float() @ row.float()).chunk(2)
            if experts.spec.limit is None:
                out = experts.down[expert].float() @ (F.silu(gate) * up)
            else:
                bias, limit = experts.gate_up_bias[expert].float().chunk(2), experts.spec.limit
                gate, up = (gate + bias[0]).clamp(max=limit), (up + bias[1]).clamp(-limit, limit)
                inner = gate * (gate * experts.spec.alpha).sigmoid() * (up + 1)
                out = experts.down[expert].float() @ inner + experts.down_bias[expert].float()
            total += weight * out
        found.append(total)
    return torch.stack(found)


@pytest.fixture(params=["grouped", "old torch", "all rows"])
def compute(request, monkeypatch):
    """With torch's product of groups, without it, and with all experts for all rows."""
    if request.param == "old torch":
        monkeypatch.delattr(F, "grouped_mm")
    if request.param == "all rows":
        monkeypatch.setattr(Experts, "_by_group", Experts._dense)
    return Experts.__call__


def chosen(spec: ExpertSpec, scores: list[float], bias: list[float]) -> dict[int, float]:
    """The experts of a row and their weights, in plain Python, after the published descriptions."""
    if spec.sigmoid:
        values = [1 / (1 + math.exp(-score)) if score > -700 else 0.0 for score in scores]
    else:
        values = [math.exp(score - max(scores)) for score in scores]
        values = [value / sum(values) for value in values]
    ranks, size = [value + more for value, more in zip(values, bias, strict=True)], spec.count // spec.groups
    groups = [range(first, first + size) for first in range(0, spec.count, size)]
    groups.sort(key=lambda group: -sum(sorted((ranks[i] for i in group), reverse=True)[: spec.best]))
    seen = [i for group in groups[: spec.chosen_groups] for i in group]
    found = {i: values[i] for i in sorted(seen, key=lambda i: -ranks[i])[: spec.chosen]}
    total = sum(found.values()) if spec.normalized else 1.0
    return {i: spec.scale * value / total if value else 0.0 for i, value in found.items()}


@pytest.mark.parametrize("best", [1, 2])
@pytest.mark.parametrize("groups", [(1, 1), (3, 2)])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_the_choice_of_experts(sigmoid, normalized, groups, best):
    """Also of rows for which all scores underflow."""
    spec = ExpertSpec((0,), COUNT, 2, 40, sigmoid=sigmoid, normalized=normalized, groups=groups[0],
                      chosen_groups=groups[1], best=best, scale=2.5)  # fmt: skip
    experts = make()
    experts.spec, experts.bias = spec, torch.linspace(0.3, -0.2, COUNT) if sigmoid else None
    x, bias = rows(20), [0.0] * COUNT if experts.bias is None else experts.bias.tolist()
    if sigmoid:
        experts.router[:, 0], x[:, 0] = -1.0, torch.tensor([0.0, 1e3] * 10)
    scores = F.linear(x.double(), experts.router.double())
    for row, found, weights in zip(scores.tolist(), *experts.choose(x), strict=True):
        wanted = chosen(spec, row, bias)
        assert dict(zip(found.tolist(), weights.tolist(), strict=True)) == pytest.approx(wanted, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("inner", [40, 41])
@pytest.mark.parametrize("limit", [None, 2.0])
@pytest.mark.parametrize("count", [1, 2, 33])
def test_sums_are_those_of_each_rows_experts(compute, limit, inner, count):
    """Also if the rows of weights are no multiples of 16 bytes."""
    experts, x = make(limit, inner), rows(count)
    torch.testing.assert_close(compute(experts, x), one_by_one(experts, x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("limit", [None, 2.0])
def test_half_precision(compute, limit):
    experts, x = make(limit, dtype=torch.bfloat16), rows(40, torch.bfloat16)
    found, wanted = compute(experts, x), one_by_one(experts, x)
    assert found.dtype == torch.bfloat16
    assert (found - wanted).norm() < 0.01 * wanted.norm()


def test_experts_that_no_row_has_chosen_and_rows_without_numbers(compute):
    experts, x = make(), rows(9)
    experts.bias = torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0, 8.0])
    wanted = compute(experts, x)
    torch.testing.assert_close(wanted, one_by_one(experts, x), atol=1e-4, rtol=1e-4)
    # What other experts give counts for nothing, even if it is no number.
    experts.gate_up[1:5] = torch.nan
    x[3] = torch.nan
    kept = [0, 1, 2, 4, 5, 6, 7, 8]
    torch.testing.assert_close(compute(experts, x)[kept], wanted[kept])


@pytest.mark.parametrize("dense", [False, True])
def test_operations_do_not_grow_with_rows(monkeypatch, dense):
    if dense:
        monkeypatch.setattr(Experts, "_by_group", Experts._dense)
    experts, counts = make(2.0), []
    for count in (2, 32, 300):
        with Operations() as operations:
            experts(rows(count))
        counts.append(operations.count)
    assert counts[0] == counts[1] == counts[2] < 50


@pytest.mark.parametrize(("most", "sizes"), [(64, [1, 2, 8]), (2, [1, 2])])
def test_decode_steps_with_experts_are_captured_unless_they_would_wait(
    default_model_dir, tmp_path, monkeypatch, most, sizes
):
    """A capture would fail at the host's look at counts, which GPUs without a kernel need for more than a few rows."""
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in())
    monkeypatch.setattr("runtime.execution.graphs.capture", recorded)
    monkeypatch.setattr(Experts, "most_free_rows", most)
    path = save_small("Qwen3Moe", tmp_path, vocab_size=WITH_TOKENIZER)
    shutil.copy(default_model_dir / "tokenizer.json", path)
    executor = check_whole_engines(path, monkeypatch, step_tokens=64, cuda_graph_batches="1,2,8")
    assert executor.decoder.graphs.sizes == sizes
    assert executor.decoder.graphs.prompt_sizes == ([64] if most == 64 else [])
    assert any(graph._replay for graph in executor.decoder.graphs._graphs.values())
