"""The store of boundary states: what it keeps within its bound, and what goes first."""

from __future__ import annotations

import torch

from radix import Namespace
from runtime.reuse.bicache.boundary_states import BoundaryStore

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


def test_states_are_found_by_encoding_rows_and_depth():
    store = filled(5)
    assert store.get(A, 3, 1).tolist() == [[1.0, 1.0]] * 3
    assert store.get(B, 2, 1).tolist() == [[2.0, 2.0]] * 2
    for key in ((B, 3, 1), (A, 2, 1), (A, 3, 2), (Namespace("t", entry="a"), 3, 1), (None, 3, 1)):
        assert store.get(*key) is None
    assert store.num_bytes == 5 * ROW


def test_the_bound_is_kept_and_the_least_recently_read_goes_first():
    store = filled(5)
    store.put(A, 2, states(1))
    assert (store.get(A, 3, 1), store.num_bytes) == (None, 3 * ROW)
    assert store.get(B, 2, 1) is not None
    assert store.get(A, 1, 2) is not None
    store = filled(5)
    store.get(A, 3, 1)
    store.put(A, 2, states(1))
    assert (store.get(B, 2, 1), store.num_bytes) == (None, 4 * ROW)
    assert store.get(A, 3, 1) is not None


def test_as_many_go_as_have_to():
    store = filled(6)
    store.put(A, 3, states(1))
    assert store.num_bytes == 6 * ROW, "all fit"
    store.put(B, 4, states(4))
    assert (store.get(A, 3, 1), store.get(B, 2, 1)) == (None, None)
    assert store.get(A, 1, 3) is not None
    assert store.num_bytes == 5 * ROW


def test_states_beyond_the_bound_are_not_kept_and_push_nothing_out():
    store = filled(5)
    store.put(A, 2, states(6))
    assert store.get(A, 6, 2) is None
    assert store.num_bytes == 5 * ROW
    store.put(A, 2, states(5))
    assert store.get(A, 5, 2) is not None
    assert store.num_bytes == 5 * ROW
    nothing = BoundaryStore(0)
    nothing.put(A, 1, states(1))
    assert nothing.get(A, 1, 1) is None


def test_the_same_states_are_counted_once():
    store = filled(8)
    store.put(A, 1, states(3, 9.0))
    assert store.num_bytes == 5 * ROW
    assert store.get(A, 3, 1)[0, 0] == 1.0
    store.put(A, 2, states(3))
    assert store.num_bytes == 8 * ROW


def test_an_encoding_is_dropped_for_all_depths_and_no_other():
    store = filled(9)
    store.put(A, 2, states(4))
    store.discard(A)
    assert (store.get(A, 3, 1), store.get(A, 4, 2)) == (None, None)
    assert store.get(B, 2, 1) is not None
    assert store.num_bytes == 2 * ROW
    store.clear()
    assert (store.get(B, 2, 1), store.num_bytes) == (None, 0)
    store.put(B, 1, states(9))
    assert store.get(B, 9, 1) is not None
