"""Experts by the native kernels against those in torch."""

import pytest
import torch

from runtime.execution.experts import Experts
from runtime.execution.ops import Ops
from runtime.models.experts import ExpertSpec
from tests.runtime.execution.native.mixtures import Mixture

COUNT, HIDDEN, INNER = 5, 48, 40


def random_experts(limit: float | None) -> Experts:
    """Experts of Qwen3-MoE, or of gpt-oss if gates have a limit."""
    spec = ExpertSpec((0,), COUNT, 2, INNER, limit=limit, alpha=1.7)
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    experts = Experts(
        spec, Ops(), normal(COUNT, HIDDEN), normal(COUNT, 2 * INNER, HIDDEN), normal(COUNT, HIDDEN, INNER)
    )
    if limit is not None:
        experts.router_bias, experts.gate_up_bias = normal(COUNT), normal(COUNT, 2 * INNER)
        experts.down_bias = normal(COUNT, HIDDEN)
    return experts


def test_the_bias_of_sigmoids_chooses_experts_and_does_not_weigh_them():
    experts = random_experts(None)
    experts.spec = ExpertSpec((0,), COUNT, 2, INNER, sigmoid=True, normalized=False, scale=2.0)
    experts.bias = torch.tensor([0.0, 0.0, 9.0, 0.0, 8.0])
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(2))
    chosen, weights = experts.choose(x)
    assert chosen.tolist() == [[2, 4]] * 3
    torch.testing.assert_close(weights, 2 * (x @ experts.router.T).sigmoid()[:, [2, 4]])


@pytest.mark.parametrize("limit", [None, 2.0])
@pytest.mark.parametrize("rows", [1, 9])
def test_products_are_those_of_torch(library, limit, rows):
    experts = random_experts(limit)
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(2))
    wanted = experts(x)
    torch.testing.assert_close(Mixture(library, experts)(x), wanted, atol=1e-4, rtol=1e-4)
    kept = [weight.untyped_storage().nbytes() for weight in (experts.gate_up, experts.down)]
    assert kept == [0] * 2, "the weights are there twice"


@pytest.mark.parametrize("options", [
    {"groups": 2, "chosen_groups": 1, "sigmoid": True, "scale": 2.5}, {"groups": 3, "chosen_groups": 2, "best": 1},
    {"normalized": False}, {"shared": 24}, {"shared": 24, "shared_gate": True, "sigmoid": True},
])  # fmt: skip
def test_every_kind_of_choice_and_a_shared_expert(library, options):
    draw = torch.Generator().manual_seed(3)
    count = 6
    spec = ExpertSpec((0,), count, 2, INNER, **options)
    router, gate_up = torch.randn(count, HIDDEN, generator=draw), torch.randn(count, 2 * INNER, HIDDEN, generator=draw)
    experts = Experts(spec, Ops(), router, gate_up, torch.randn(count, HIDDEN, INNER, generator=draw))
    experts.bias = torch.randn(count, generator=draw) if spec.sigmoid else None
    x = torch.randn(17, HIDDEN, generator=draw)
    wanted, given = experts(x), {}
    if spec.shared:
        shared = torch.randn(48, HIDDEN, generator=draw), torch.randn(HIDDEN, 24, generator=draw)
        output, given = Ops().silu_and_mul(x @ shared[0].T) @ shared[1].T, {"shared": shared}
        if spec.shared_gate:
            given["shared_gate"] = torch.randn(1, HIDDEN, generator=draw)
            output *= (x @ given["shared_gate"].T).sigmoid()
        wanted += output
    torch.testing.assert_close(Mixture(library, experts, **given)(x), wanted, atol=1e-3, rtol=1e-3)


def test_rows_without_numbers_leave_the_others_as_they_are(library):
    native, x = (
        Mixture(library, random_experts(None)),
        torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2)),
    )
    wanted = native(x)
    x[[0, 5]], x[7] = torch.nan, torch.inf
    kept = [1, 2, 3, 4, 6, 8]
    assert torch.equal(native(x)[kept], wanted[kept])
    assert native(x)[0].isnan().all()


def test_eight_bits(library):
    experts, x = random_experts(2.0), torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(2))
    wanted = experts(x)
    error = Mixture(library, experts, threads=1, bits=8)(x) - wanted
    assert 0 < float(error.norm() / wanted.norm()) < 0.02


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("limit", [None, 2.0])
def test_rows_get_the_same_bits_in_any_company(library, limit, bits):
    if not library.multiplies_pairs:
        pytest.skip("only pairs of bfloat16 are summed in one order")
    experts = random_experts(limit)
    experts.gate_up, experts.down = experts.gate_up.bfloat16(), experts.down.bfloat16()
    native = Mixture(library, experts, bits=bits)
    x = torch.randn(70, HIDDEN, generator=torch.Generator().manual_seed(2))
    wanted = native(x)
    for start, stop in ((0, 1), (1, 9), (9, 70), (33, 34)):
        assert torch.equal(native(x[start:stop]), wanted[start:stop])
