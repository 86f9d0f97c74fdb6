"""The index of blocks by replica."""

from hypothesis import given
from hypothesis import strategies as st

from server.ray.prefixes import PrefixIndex


def test_leading_blocks_count_and_gaps_end_a_match():
    index = PrefixIndex[str]()
    index.stored("a", [1, 2, 3])
    index.stored("b", [1, 3])
    assert index.match([1, 2, 3, 4]) == {"a": 3, "b": 1}
    assert index.match([2, 3]) == {"a": 2}
    assert index.match([]) == index.match([9]) == {}
    index.removed("a", [2, 7])
    assert index.match([1, 2, 3]) == {"a": 1, "b": 1}
    index.forget("b")
    assert (index.match([1]), index.held("a"), index.held("b")) == ({"a": 1}, {1, 3}, set())
    index.forget("a")
    assert not index._holders, "nothing is kept of what nobody holds"


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.lists(st.integers(0, 9), max_size=4)), max_size=30))
def test_the_index_is_a_set_of_blocks_for_each_replica(changes):
    index, held = PrefixIndex[str](), {"a": set(), "b": set()}
    for stores, replica, blocks in changes:
        (index.stored if stores else index.removed)(replica, blocks)
        held[replica] = held[replica] | set(blocks) if stores else held[replica] - set(blocks)
    prompt = list(range(10))
    expected = {r: next((n for n in prompt if n not in blocks), 10) for r, blocks in held.items()}
    assert index.match(prompt) == {replica: n for replica, n in expected.items() if n}


def test_who_lost_a_block_last_is_remembered_until_somebody_has_it_again():
    index = PrefixIndex[str](remembered=3)
    index.stored("a", [1, 2, 3])
    index.stored("b", [1, 2])
    index.removed("a", [2, 3])
    assert index.lost([1, 2, 3, 4]) == ("a", 3)
    assert index.lost([1, 2]) == (None, 0), "b has it"
    index.removed("b", [2])
    assert index.lost([1, 2]) == ("b", 2)
    assert index.lost([5, 3]) == (None, 0), "the first block of all is unknown"
    index.stored("c", [3])
    assert index.lost([1, 2, 3]) == ("b", 2)
    index.stored("c", [7, 8])
    index.forget("c")
    assert index.lost([7, 8]) == (None, 0), "c is no more"
    index.removed("a", [1])
    index.removed("b", [1])
    index.stored("c", [4, 5, 6])
    index.removed("c", [4, 5, 6])
    assert index.lost([1, 2]) == (None, 0), "three are remembered"
    assert index.lost([4, 5, 6]) == ("c", 3)
