"""Products with GGUF's types, as they are stored."""

import ctypes

import numpy as np
import pytest
import torch

from runtime.execution.native import library as c
from runtime.execution.native.codes import describe_codes, pack_into
from runtime.execution.native.packed import Team
from runtime.models.ggml import decode
from tests.runtime.models.test_ggml import FIELDS, dequantized, random_rows

N, ROWS = 100, 27


@pytest.mark.parametrize("kind", FIELDS)
def test_products_of_a_row_alone_and_among_others(library, kind):
    k = 768 if "_K" in kind else 608
    stored = random_rows(kind, N, k)
    matrix = describe_codes(decode(stored[:1], kind), N, False)
    data = np.empty(library.matrix_bytes(ctypes.byref(matrix)), np.uint8)
    pack_into(data, matrix, lambda rows: decode(stored[rows], kind), library.panel)
    matrix.data = data.ctypes.data
    team, x = Team(library, 2), torch.randn(ROWS, k, generator=torch.Generator().manual_seed(0))

    def multiply(x):
        out = torch.empty(len(x), N)
        sizes = {"lda": k, "m": len(x), "ldc": N, "columns": N}
        product = c.Product(a=x.data_ptr(), w=ctypes.pointer(matrix), c=out.data_ptr(), **sizes)
        library.multiply(team.handle, ctypes.byref(product))
        return out

    groups = x.unflatten(1, (-1, matrix.group))
    steps = groups.abs().amax(2, keepdim=True) / 127
    rounded = ((groups / steps).round() * steps).flatten(1).double()
    weight = torch.from_numpy(dequantized(stored, kind)).double()
    got, wanted = multiply(x), rounded @ weight.T
    assert (got - wanted).abs().max() < 2e-6 * (rounded.abs() @ weight.abs().T).max()
    # What is left is the rounding of activations: at most half a step of each.
    bound = (steps.expand_as(groups).flatten(1).double() / 2) @ weight.abs().T
    assert ((got - x.double() @ weight.T).abs() <= 1.01 * bound).all()
    for first, last in ((0, 1), (5, 6), (3, 20)):
        assert torch.equal(multiply(x[first:last]), got[first:last])
