"""The outline of a tree that changes during the walk."""

from array import array

from runtime.calls import GetOutline
from tests.runtime.engine.driver import Driver, call, make_core


def test_each_walk_shows_the_tree_of_its_own_time(ids_dir):
    core = make_core(ids_dir, pool_tokens=64, page_size=1)
    driver, tree = Driver(core), core.cache.tree
    for i in range(1200):
        tree.insert(array("i", [i]).tobytes(), array("i", [i]))
    driver.begin(1, GetOutline(2000))
    assert driver.answer() is None, "the walk takes several steps"
    tree.flush()
    tree.insert(array("i", [7, 8]).tobytes(), array("i", [0, 1]))
    (root, block) = call(core, GetOutline(2000)).blocks
    assert (root.total, block.tokens) == (2, 2)
