"""The pool's tensors: rows of pages, written and copied in all layers."""

from types import SimpleNamespace

import pytest
import torch

from runtime.kv.pool import KVPool

CPU = torch.device("cpu")


def make_pool(dtype: torch.dtype = torch.float32, **options) -> KVPool:
    return KVPool(2, 4, 3, 2, 5, dtype, CPU, **options)


def test_sizes():
    assert make_pool().k.shape == make_pool().v.shape == (2, 12, 2, 5)
    assert make_pool(spare_pages=2).v.shape == (2, 18, 2, 5)
    assert make_pool(spare_pages=2).num_pages == 4
    assert KVPool.bytes_per_token(3, 2, 5, torch.bfloat16) == 2 * 3 * 2 * 5 * 2
    pool = make_pool()
    assert pool.k.dtype == pool.v.dtype == torch.float32
    elsewhere = KVPool(1, 1, 1, 1, 1, torch.float16, torch.device("meta"))
    assert [(tensor.dtype, tensor.device.type) for tensor in (elsewhere.k, elsewhere.v)] == [
        (torch.float16, "meta")
    ] * 2
    assert (pool.k.nbytes + pool.v.nbytes) / 12 == KVPool.bytes_per_token(2, 2, 5, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_rows_are_written_to_their_slots_of_one_layer(dtype):
    pool = make_pool(dtype)
    k, v = torch.full((2, 2, 5), 1.5), torch.full((2, 2, 5), -2.0)
    pool.write(1, torch.tensor([7, 2]), k, v)
    assert pool.k[1, [7, 2]].float().equal(k)
    assert pool.v[1, [7, 2]].float().equal(v)
    assert (pool.k.float().sum(), pool.v.float().sum()) == (30, -40), "and nowhere else"


def test_the_first_rows_of_a_page_are_copied_in_all_layers():
    pool, told = make_pool(), []
    pool.k[:] = torch.arange(12.0)[None, :, None, None]
    pool.v[:] = pool.k + 100
    pool.copy_rows(3, 1, 2)
    pool.others = SimpleNamespace(copy_rows=lambda *arguments: told.append(arguments))
    pool.before_write = lambda pages: told.append((*pages, pool.k[0, 6, 0, 0].item()))
    pool.copy_rows(0, 2, 1)
    rows = [0, 1, 2, 9, 10, 5, 0, 7, 8, 9, 10, 11]
    for layer in range(2):
        assert pool.k[layer, :, 1, 4].tolist() == rows
        assert pool.v[layer, :, 0, 0].tolist() == [row + 100 for row in rows]
    assert told == [(0, 2, 1), (2, 6.0)], "pools elsewhere copy the same rows; a tier may read the page before"
