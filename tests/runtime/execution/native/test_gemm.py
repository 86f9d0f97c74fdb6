"""The packed matrix product against torch in float64."""

import ctypes

import pytest
import torch
import torch.nn.functional as F

from runtime.execution.native import library as c
from runtime.execution.native.packed import PackedWeights, Team, describe, packed_bytes
from runtime.models.ggml import encode

STORE, ADD, SILU = 0, 1, 2


class Packed:
    """One packed matrix, and its product."""

    def __init__(self, library, weight, bias=None, paired=False, threads=2, storage=torch.float32):
        self.library, self.team = library, Team(library, threads)
        bits = storage if isinstance(storage, int) else 0
        weight = weight if bits else weight.to(storage)
        self.weights = PackedWeights(self.team, packed_bytes(library, describe(weight, paired, bits)))
        self.matrix = self.weights.add(weight, bias, paired, bits)

    def multiply(self, a, c_in, into, **options):
        out = c_in.clone()
        product = c.Product(
            a=a.data_ptr(),
            lda=a.stride(0),
            m=len(a),
            w=ctypes.pointer(self.matrix),
            c=out.data_ptr(),
            ldc=out.stride(0),
            columns=out.shape[1],
            into=into,
            **options,
        )
        self.library.multiply(self.team.handle, ctypes.byref(product))
        return out


def rows(count: int, k: int) -> torch.Tensor:
    """Random rows; a finite number follows an odd k."""
    return torch.randn(count, k + 5)[:, :k]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows of float32 in 8 bits, each 32 with their largest as 127, in float64."""
    groups = F.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    most = groups.abs().amax(2, keepdim=True).clamp_min(1e-30)
    whole = (groups * torch.tensor(127.0).div(most)).round().double()
    return (whole * (most / 127).double()).flatten(1)[:, : x.shape[1]]


def product(a, weight, bias, storage):
    """Rows times weights as stored, in float64; `storage` is a dtype or a number of bits."""
    bias = None if bias is None else bias.double()
    if isinstance(storage, int):
        stored = torch.from_numpy(encode(weight.numpy(), storage).values())[:, : weight.shape[1]]
        return F.linear(rounded(a), stored.double(), bias)
    return F.linear(a.double(), weight.to(storage).double(), bias)


def check(library, got, wanted, storage):
    # That variant rounds activations to bfloat16, too.
    rounds = library.multiplies_pairs and storage == torch.bfloat16
    error = (got.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9)
    assert error < (2e-2 if rounds else 5e-6)


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, 4, 8])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (31, 7), (64, 64), (100, 33), (960, 576), (48, 1537)])
def test_any_number_of_rows(library, storage, threads, n, k):
    torch.manual_seed(n + k)
    weight, bias = torch.randn(n, k), torch.randn(n)
    packed = Packed(library, weight, bias, threads=threads, storage=storage)
    for count in (*range(1, 18), 25, 40, 200):
        a = rows(count, k)
        got = packed.multiply(a, torch.full((count, n), torch.nan), STORE)
        check(library, got, product(a, weight, bias, storage), storage)


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, 4, 8])
def test_blocks_of_rows(library, storage):
    """More rows than fit into one block of the second-level cache."""
    weight, a = torch.randn(70, 900), rows(1000, 900)
    got = Packed(library, weight, storage=storage).multiply(a, torch.zeros(1000, 70), STORE)
    check(library, got, product(a, weight, None, storage), storage)


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, 4, 8])
@pytest.mark.parametrize("biased", [False, True])
def test_residual_is_added(library, storage, biased):
    weight, bias = torch.randn(50, 40), torch.randn(50) if biased else None
    a, residual = rows(9, 40), torch.randn(9, 50)
    got = Packed(library, weight, bias, storage=storage).multiply(a, residual, ADD)
    check(library, got, residual + product(a, weight, bias, storage), storage)


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, 4, 8])
@pytest.mark.parametrize("inner", [1, 16, 80, 100])
def test_gate_and_up(library, storage, inner):
    weight, bias = torch.randn(2 * inner, 24), torch.randn(2 * inner)
    a = rows(13, 24)
    got = Packed(library, weight, bias, paired=True, storage=storage).multiply(a, torch.zeros(13, inner), SILU)
    gate, up = product(a, weight, bias, storage).chunk(2, dim=1)
    check(library, got, F.silu(gate) * up, storage)


@pytest.mark.parametrize(("inner", "k"), [(80, 24), (100, 33)])
def test_rounded_activations(library, inner, k):
    """Rows that are bfloat16 already, and a result in bfloat16, to the bit."""
    if not library.multiplies_pairs:
        pytest.skip("only where pairs of bfloat16 are multiplied")
    packed = Packed(library, torch.randn(2 * inner, k), paired=True, storage=torch.bfloat16)
    a, c_in = F.pad(rows(13, k), (0, k % 2)), torch.full((13, inner), 7.0)
    wanted = packed.multiply(a, c_in, SILU)
    pairs = a.bfloat16().view(torch.float32)
    assert torch.equal(packed.multiply(pairs, c_in, SILU, takes_pairs=1), wanted)
    got = packed.multiply(pairs, c_in, SILU, takes_pairs=1, gives_pairs=1)
    assert torch.equal(got.view(torch.bfloat16)[:, :inner], wanted.bfloat16())
    assert (got[:, (inner + 1) // 2 :] == 7).all()


def test_silu_at_the_ends_of_float32(library):
    """One column each of gate and up, so that the gate's values are the inputs times one."""
    x = torch.tensor([[-3e38], [-200.0], [-90.0], [-1e-30], [0.0], [88.0], [200.0], [3e38]])
    got = Packed(library, torch.ones(2, 1), torch.tensor([0.0, 1.0]), paired=True)
    packed = got.multiply(F.pad(x, (0, 3))[:, :1], torch.zeros(8, 1), SILU)
    wanted = F.silu(x.double()) * (x.double() + 1)
    finite = wanted.abs() < 3e38
    torch.testing.assert_close(packed[finite].double(), wanted[finite], rtol=3e-5, atol=1e-30)


def test_padding_is_not_written(library):
    weight = torch.randn(33, 8)
    out = torch.full((3, 64), 7.0)
    got = Packed(library, weight).multiply(rows(3, 8), out[:, :33], STORE)
    assert got.shape == (3, 33)
    wide = out.clone()
    packed = Packed(library, weight)
    a = rows(3, 8)
    product = c.Product(
        a=a.data_ptr(), lda=a.stride(0), m=3, w=ctypes.pointer(packed.matrix), c=wide.data_ptr(), ldc=64, columns=33
    )
    library.multiply(packed.team.handle, ctypes.byref(product))
    assert (wide[:, 33:] == 7).all()
    check(library, wide[:, :33], a.double() @ weight.double().T, torch.float32)
