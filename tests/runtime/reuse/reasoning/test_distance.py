"""Distances of pages, with their keys as they are and as they were before their rotation."""

from __future__ import annotations

import pytest
import torch

from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding, rotate
from runtime.models.spec import RopeSpec
from runtime.reuse.reasoning import distance
from runtime.reuse.reasoning.distance import Distances, Page

LAYERS, PAGES, ROWS, HEADS, DIM = 5, 4, 8, 2, 16
ROPE = RotaryEmbedding(RopeSpec(10_000.0), DIM, torch.device("cpu"))


def make_pool(dtype: torch.dtype) -> KVPool:
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
    measure = Distances(pool, ROPE)
    pages = [Page(i, 8 * i) for i in range(PAGES)]
    for a in range(PAGES):
        for b in range(PAGES):
            expected = pytest.approx(plain(pool, a, b), rel=1e-5, abs=2e-2 if a == b else 1e-5)
            assert measure.between(pages[a], pages[b]) == expected
    before = measure.between(pages[0], pages[1])
    if dtype == torch.float32:
        for tensor in (pool.k, pool.v):
            for layer in range(LAYERS):
                for head in range(HEADS):
                    tensor[layer, 3, head] += 2
                    assert measure.between(Page(0, 0), pages[1]) != pytest.approx(before, rel=1e-4)
                    tensor[layer, 3, head] -= 2


def test_norms_are_measured_once():
    pool = make_pool(torch.float32)
    measure, a, b = Distances(pool, ROPE), Page(0, 0), Page(1, 8)
    measure.between(a, b)
    kept = a.squares
    assert kept is not None
    measure.between(a, Page(2, 16))
    assert a.squares is kept
    assert kept[0].tolist() == pytest.approx(rows(pool.k, 0).square().sum((1, 2, 3)).tolist(), rel=1e-5)
    assert kept[1].tolist() == pytest.approx(rows(pool.v, 0).square().sum((1, 2, 3)).tolist(), rel=1e-5)


def test_equal_pages_have_no_distance_and_no_root_of_less_than_nothing():
    pool = make_pool(torch.float32)
    pool.k.mul_(1e3)
    pool.v.mul_(1e3)
    for page in range(PAGES):
        assert 0 <= Distances(pool, ROPE).between(Page(page, 0), Page(page, 0)) < 1


def test_moved_pages_are_compared_without_their_rotations():
    pool = make_pool(torch.float32)
    raw = torch.randn(ROWS, HEADS, DIM)
    starts = (3, 131)
    for page, start in enumerate(starts):
        keys = rotate(raw, *ROPE.cos_sin(torch.arange(start, start + ROWS)))
        pool.k[:, page * ROWS : (page + 1) * ROWS] = keys
    pool.v.zero_()
    measure, (a, b) = Distances(pool, ROPE), [Page(page, start) for page, start in enumerate(starts)]
    assert measure.between(a, b, moved=True) < 1e-3
    assert measure.between(b, a, moved=True) < 1e-3
    assert measure.between(a, b) > 0.05
