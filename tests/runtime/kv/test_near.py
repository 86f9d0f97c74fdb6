"""Places of pages in the pool of the layers with a window."""

import numpy as np
import pytest
import torch

from runtime.kv.near import NearPages
from runtime.kv.pool import KVPool


@pytest.fixture
def near():
    return NearPages(KVPool(1, 3, 4, 1, 8, torch.float32, torch.device("cpu")), 10)


def placed(near) -> list[int]:
    near.check()
    return np.flatnonzero(near.has(np.arange(10))).tolist()


def test_a_page_has_a_place_while_a_request_uses_it_and_until_another_needs_it(near):
    near.take([5, 6])
    near.take([6])
    near.leave([5, 6], keep=True)
    assert (placed(near), near.num_used) == ([5, 6], 1)
    near.take([7, 8])
    assert (placed(near), near.num_used) == ([6, 7, 8], 3)


def test_passed_pages_go_first_then_the_longest_unused_end_that_is_not_protected(near):
    near.protected = lambda: {1}
    near.take([1, 2, 3])
    near.leave([1, 2], keep=True)
    near.leave([3], keep=False)
    near.take([4])
    assert placed(near) == [1, 2, 4]
    near.leave([4], keep=True)
    near.take([5])
    assert placed(near) == [1, 4, 5]
    near.leave([5], keep=True)
    near.take([6, 7, 8])
    assert placed(near) == [6, 7, 8], "live requests get the places of protected pages, too"


def test_no_page_loses_its_place_to_one_that_is_taken_with_it(near):
    near.take([1, 2, 3])
    near.leave([1, 2, 3], keep=False)
    place = near.places[1]
    near.take([4, 1])
    assert (placed(near), near.places[1]) == ([1, 3, 4], place)


def test_a_page_of_the_tree_takes_over_the_rows_of_a_copy(near):
    near.take([1, 2])
    place = near.places[1]
    near.move(1, 4)
    assert (near.places[4], placed(near), near.num_used) == (place, [2, 4], 2)
    near.take([3])
    near.move(3, 4)
    near.leave([4], keep=True)
    assert (placed(near), near.num_used) == ([2, 4], 2), "both users went over"
    near.leave([4], keep=True)
    assert near.num_used == 1
    near.move(9, 4)
    assert near.num_used == 1, "page 9 has no rows"


def test_dropped_pages_free_their_places(near):
    near.take([1, 2, 3])
    near.leave([1], keep=True)
    near.drop([1, 2, 7])
    assert (placed(near), near.num_used) == ([3], 1)


def test_slots_are_rows_of_the_places(near):
    near.take([3, 8])
    where = near.slots(np.array([12, 15, 32, -1]))
    assert where.tolist() == [4 * near.places[3], 4 * near.places[3] + 3, 4 * near.places[8], -1]
