"""Earlier places of a text's last tokens: beside a search through everything."""

from array import array
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix import Namespace, RadixTree
from runtime.features.drafts import lookup
from runtime.features.drafts.lookup import LEAST, Places, RecentOutputs, continuation

few = st.integers(0, 2)


def latest(text: list[int]) -> tuple[int, int]:
    """The answer of `Places.find`, by trying all places."""
    found, tried = (0, 0), 0
    for end in range(len(text) - 1, LEAST - 1, -1):
        if text[end - LEAST : end] == text[-LEAST:] and tried < 8:
            equal = LEAST
            while equal < min(end, 16) and text[end - equal - 1] == text[-equal - 1]:
                equal += 1
            found, tried = max(found, (end, equal), key=lambda one: one[1]), tried + 1
    return found


@given(st.lists(st.lists(few, min_size=1, max_size=12), min_size=1, max_size=6))
@settings(deadline=None)
def test_the_latest_place_is_found_however_the_text_grows(pieces):
    text, places = array("i"), Places()
    for piece in pieces:
        text.extend(piece)
        places.follow(text)
        assert places.find(text, text) == latest(text.tolist())


def test_ids_of_21_bits_do_not_meet():
    high = (1 << 21) - 1
    text = array("i", [0, 1, 5, high, 0, 1, 7, 0, 1])
    places = Places()
    places.follow(text)
    assert places.find(text, text) == (6, 2)
    assert places.find(text, array("i", [high, 0])) == (5, 2)
    assert places.find(text, array("i", [high, 0, 1])) == (6, 3)
    assert places.find(text, array("i", [0, high])) == (0, 0)


@given(st.lists(st.lists(few, min_size=1, max_size=10), max_size=8), st.lists(few, max_size=8), st.integers(1, 6))
@settings(deadline=None)
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_the_tree_continues_a_key_with_what_some_sequence_has(page_size, sequences, key, limit):
    tree, pages = RadixTree(page_size), count()
    held = []
    for sequence in sequences:
        whole = sequence[: len(sequence) // page_size * page_size]
        tree.insert(array("i", whole).tobytes(), array("i", [next(pages) for _ in range(len(whole) // page_size)]))
        held.append(whole)
    found = continuation(tree, array("i", key).tobytes(), Namespace(), limit).tolist()
    longer = [sequence[len(key) :][:limit] for sequence in held if sequence[: len(key)] == key]
    assert len(found) <= limit
    if found:
        assert any(sequence[: len(key) + len(found)] == key + found for sequence in held)
        assert len(found) == limit or any(sequence == key + found for sequence in held)
    else:
        assert not key or not any(longer), "an empty key has no node"


def test_other_namespaces_are_not_read():
    tree, recent = RadixTree(1), RecentOutputs()
    key, ours, theirs = array("i", [1, 2, 3]), Namespace("t", "1"), Namespace("t", "2")
    tree.insert(array("i", [1, 2, 3, 4]).tobytes(), array("i", range(4)), theirs)
    recent.add(theirs, array("i", [1, 2, 3, 4]))
    assert continuation(tree, key.tobytes(), theirs, 8).tolist() == [4]
    assert recent.find(theirs, key, 8) == (array("i", [4]), 3)
    assert not continuation(tree, key.tobytes(), ours, 8)
    assert recent.find(ours, key, 8) == (array("i"), 0)


def test_recent_outputs_are_forgotten_when_newer_ones_have_come(monkeypatch):
    monkeypatch.setattr(lookup, "_REMEMBERED", 8)
    monkeypatch.setattr(lookup, "_NAMESPACES", 2)
    recent, spaces = RecentOutputs(), [Namespace(str(i)) for i in range(3)]
    texts = [array("i", range(10 * i, 10 * i + 8)) for i in range(4)]
    for i, text in enumerate(texts):
        recent.add(spaces[0], text)
        assert recent.find(spaces[0], text[:3], 2) == (text[3:5], 3)
        assert recent.find(spaces[0], texts[max(i - 1, 0)][:3], 2)[1], "the one before is still there"
    assert not recent.find(spaces[0], texts[0][:3], 2)[1]
    for space in spaces[1:]:
        recent.add(space, texts[0])
    assert not recent.find(spaces[0], texts[3][:3], 2)[1], "too many namespaces"
    recent.clear()
    assert not recent.find(spaces[2], texts[0][:3], 2)[1]
