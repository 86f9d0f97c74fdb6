"""Distances of pages."""

import pytest
import torch

from runtime.features.reasoning import distance
from runtime.features.reasoning.distance import Distances, MeasuredPage
from runtime.kv.pool import KVPool

LAYERS, PAGES, ROWS, HEADS, DIM = 5, 4, 8, 2, 16


def make_pool(dtype: torch.dtype = torch.float32) -> KVPool:
    torch.manual_seed(0)
    pool = KVPool(LAYERS, PAGES, ROWS, HEADS, DIM, dtype, torch.device("cpu"))
    for tensor in (pool.k, pool.v):
        tensor.copy_(torch.randn(tensor.shape))
    return pool


def rows(tensor: torch.Tensor, page: int) -> torch.Tensor:
    return tensor[:, page * ROWS : (page + 1) * ROWS].double()


def plain(pool: KVPool, a: int, b: int) -> float:
    per_layer = [
        (rows(pool.k, a) - rows(pool.k, b))[i].norm() + (rows(pool.v, a) - rows(pool.v, b))[i].norm()
        for i in range(LAYERS)
    ]
    return float(sum(per_layer) / LAYERS / (ROWS * HEADS))


@pytest.mark.parametrize("at_once", [1, 2, LAYERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_all_layers_and_heads_count(monkeypatch, dtype, at_once):
    monkeypatch.setattr(distance, "_MOST_ON_CPU", at_once * ROWS * HEADS * DIM)
    pool = make_pool(dtype)
    measure = Distances(pool)
    pages = [MeasuredPage(i) for i in range(PAGES)]
    for a in range(PAGES):
        for b in range(PAGES):
            expected = pytest.approx(plain(pool, a, b), rel=1e-5, abs=2e-2 if a == b else 1e-5)
            assert measure.between(pages[a], pages[b]) == expected


def test_rounding_makes_no_root_of_a_negative_number():
    pool = make_pool()
    pool.k.mul_(1e3)
    pool.v.mul_(1e3)
    for page in range(PAGES):
        assert 0 <= Distances(pool).between(MeasuredPage(page), MeasuredPage(page)) < 1
