"""Blocked requests wake when their event has come far enough, once, and no others with them."""

from __future__ import annotations

import pytest

from runtime.engine.blocked import Blocked


def filled() -> Blocked:
    """Plain names stand for requests and events."""
    blocked = Blocked()
    for request, key, at in (("a", "peer", 4), ("b", "peer", 8), ("c", "other", 2), ("d", "peer", 4)):
        blocked.add(request, key, at)
    return blocked


def test_progress_wakes_those_who_await_no_more_than_it():
    blocked = filled()
    assert blocked.wake("peer", 3) == []
    assert blocked.wake("peer", 4) == ["a", "d"]
    assert blocked.wake("peer", 7) == []
    assert (list(blocked), len(blocked)) == (["b", "c"], 2)
    assert blocked.wake("peer", 9) == ["b"]
    assert blocked.wake("peer", 9) == []
    assert list(blocked) == ["c"]


def test_the_end_of_an_event_wakes_all_who_await_it():
    blocked = filled()
    assert blocked.wake("peer") == ["a", "b", "d"]
    assert blocked.wake("nobody's") == []
    assert blocked.wake("other") == ["c"]
    assert (len(blocked), blocked._waits, blocked._keys) == (0, {}, {}), "nothing is kept of what has ended"


def test_without_progress_an_event_has_to_begin_at_least():
    blocked = Blocked()
    blocked.add("a", "grammar")
    assert blocked.wake("grammar", -1) == []
    assert blocked.wake("grammar", 0) == ["a"]


def test_a_request_that_leaves_is_not_woken():
    blocked = filled()
    assert blocked.remove("a") == "peer"
    assert blocked.remove("c") == "other"
    assert blocked._waits.keys() == {"peer"}
    assert blocked.wake("peer") == ["b", "d"]
    assert blocked.wake("other") == []
    with pytest.raises(KeyError):
        blocked.remove("a")
