"""The store of boundary states: what it keeps within its bound, and what goes first."""

from __future__ import annotations

import torch

from radix import Namespace
from runtime.reuse.bicache.encodings import BoundaryStore

A, B = Namespace(entry="a"), Namespace(entry="b")
ROW = 4 * 2  # bytes of float32 [1, 2]


def states(rows: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((rows, 2), value)


def filled(max_rows: int) -> BoundaryStore:
    """Three rows of A and two of B, in this order."""
    store = BoundaryStore(max_rows * ROW)
    store.put(A, 1, states(3, 1.0))
    store.put(B, 1, states(2, 2.0))
    return store


def test_the_bound_is_kept_and_the_least_recently_read_goes_first():
    store = filled(5)
    store.put(A, 1, states(3, 9.0))
    assert store.currsize == 5 * ROW, "the same states are counted once"
    assert store.get((A, 3, 1)).tolist() == [[1.0, 1.0]] * 3
    store.put(A, 2, states(1))
    assert (store.get((B, 2, 1)), store.currsize) == (None, 4 * ROW)
    assert (A, 3, 1) in store
    store.put(A, 2, states(6))
    assert store.currsize == 4 * ROW, "too large to be kept, and pushes nothing out"


def test_an_encoding_is_dropped_for_all_depths_and_no_other():
    store = filled(9)
    store.put(A, 2, states(4))
    store.discard(A)
    assert list(store) == [(B, 2, 1)]
    assert store.currsize == 2 * ROW
    nothing = BoundaryStore(0)
    nothing.put(A, 1, states(1))
    assert not nothing
