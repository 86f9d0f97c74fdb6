"""The outline of a tree that changes while nobody goes on with the walk."""

from __future__ import annotations

from array import array

from runtime.protocol import GetOutline
from tests.runtime.engine.driver import make_core


def test_a_walk_that_was_left_in_the_middle_shows_no_old_tree(tiny_dir):
    core = make_core(tiny_dir, pool_tokens=64, page_size=1)
    tree = core.cache.tree

    def ask(anew: bool):
        return core.handle(GetOutline(1, 2000, 0, anew)).result["blocks"]

    for i in range(1200):
        tree.insert(array("i", [i]).tobytes(), array("i", [i]))
    assert ask(True) is None
    tree.flush()
    tree.insert(array("i", [7, 8]).tobytes(), array("i", [0, 1]))
    (root, block) = ask(True)
    assert (root["total"], block["tokens"]) == (2, 2)
