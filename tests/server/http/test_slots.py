"""Places of connections, without sockets."""

from __future__ import annotations

import resource

import pytest

from runtime.config import SchedulerConfig
from server.http.slots import Limit, Slot, TooFewDescriptors, most_connections


def test_the_oldest_silent_connection_goes_first():
    limit, closed = Limit(16), []
    slots = [Slot(limit) for _ in range(4)]
    for number, slot in enumerate(slots):
        slot.close = lambda number=number: closed.append(number)
    assert slots[0].take()
    assert slots[1].take()
    slots[1].rest()
    assert limit.busy == 1
    assert [limit.shed() for _ in range(4)] == [True, True, True, False]
    assert closed == [2, 3, 1]
    slots[0].leave()
    slots[0].leave()
    assert (limit.busy, limit.silent) == (0, {})


def test_a_limit_is_full_with_silent_and_busy_connections_together():
    limit = Limit(4)
    slots = [Slot(limit) for _ in range(3)]
    assert all(slot.take() for slot in slots)
    assert not limit.full
    Slot(limit)
    assert limit.full


def test_connections_are_counted_whether_they_are_silent_or_busy():
    everybody = Limit(16)
    slots = [Slot(Limit(8), everybody) for _ in range(3)]
    assert slots[0].take()
    assert [slot.num_connections for slot in slots] == [3, 3, 3]
    slots[1].leave()
    assert [slot.num_connections for slot in slots] == [2, 0, 2]


def test_a_full_limit_always_has_a_silent_connection():
    """Requests leave a reserve, within which connections come and go."""
    for most in (2, 3, 16, 1000):
        everybody, own = Limit(2 * most), Limit(most)
        taken = 0
        for _ in range(5 * most):
            for limit in (own, everybody):
                if limit.full:
                    assert limit.shed()
            taken += Slot(own, everybody).take()
        assert taken == own.busy == everybody.busy == own.most_busy == most - max(min(most // 8, 64), 1)
        other = Slot(Limit(most), everybody)
        assert other.take(), "another address has places left"
        other.leave()
        assert everybody.busy == taken


@pytest.fixture
def limits(monkeypatch):
    """Sets the limits that are seen, and returns the soft one that was set."""
    set_to = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: set_to.append(pair))

    def limits(soft, hard):
        set_to.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        return set_to

    return limits


def test_connections_follow_from_descriptors(limits):
    plain = SchedulerConfig(max_running=10, max_waiting=90)
    assert limits(1024, 4096) == []
    assert most_connections(plain) == 200
    raised = limits(256, 4096)
    assert most_connections(plain) == 200
    assert raised == [(328, 4096)]
    raised = limits(256, resource.RLIM_INFINITY)
    assert most_connections(SchedulerConfig(max_running=100, max_waiting=2400)) == 5000
    assert raised == [(5128, resource.RLIM_INFINITY)]
    few = SchedulerConfig(max_running=2, max_waiting=1)
    assert most_connections(few) == 16, "health must be answered beside six requests"
    limits(256, 300)
    assert most_connections(plain) == 172
    limits(64, 143)
    with pytest.raises(TooFewDescriptors, match="`ulimit -Hn` is 143"):
        most_connections(plain)
