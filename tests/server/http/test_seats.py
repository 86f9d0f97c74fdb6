"""Places of connections, without sockets."""

from __future__ import annotations

import resource

import pytest

from runtime.config import make_config
from server.http.seats import Room, Seat, TooFewDescriptors, most_connections


def test_the_oldest_silent_connection_goes_first():
    room, closed = Room(16), []
    seats = [Seat(room) for _ in range(4)]
    for number, seat in enumerate(seats):
        seat.close = lambda number=number: closed.append(number)
    assert seats[0].take()
    assert seats[1].take()
    seats[1].rest()
    assert room.busy == 1
    assert [room.shed() for _ in range(4)] == [True, True, True, False]
    assert closed == [2, 3, 1]
    seats[0].leave()
    seats[0].leave()
    assert (room.busy, room.silent) == (0, {})


def test_a_room_is_full_with_silent_and_busy_connections_together():
    room = Room(4)
    seats = [Seat(room) for _ in range(3)]
    assert all(seat.take() for seat in seats)
    assert not room.full
    Seat(room)
    assert room.full


def test_connections_are_counted_whether_they_are_silent_or_busy():
    everybody = Room(16)
    seats = [Seat(Room(8), everybody) for _ in range(3)]
    assert seats[0].take()
    assert [seat.num_connections for seat in seats] == [3, 3, 3]
    seats[1].leave()
    assert [seat.num_connections for seat in seats] == [2, 0, 2]


def test_a_full_room_always_has_a_silent_connection():
    """Requests leave a reserve, within which connections come and go."""
    for most in (2, 3, 16, 1000):
        everybody, own = Room(2 * most), Room(most)
        taken = 0
        for _ in range(5 * most):
            for room in (own, everybody):
                if room.full:
                    assert room.shed()
            taken += Seat(own, everybody).take()
        assert taken == own.busy == everybody.busy == own.most_busy == most - max(min(most // 8, 64), 1)
        other = Seat(Room(most), everybody)
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
    plain = make_config(max_running=10, max_waiting=90)
    assert limits(1024, 4096) == []
    assert most_connections(plain) == 200
    raised = limits(256, 4096)
    assert most_connections(plain) == 200
    assert raised == [(328, 4096)]
    raised = limits(256, resource.RLIM_INFINITY)
    assert most_connections(make_config(max_connections=5000)) == 5000
    assert raised == [(5128, resource.RLIM_INFINITY)]
    few = make_config(max_running=2, max_waiting=1)
    assert most_connections(few) == 16, "health must be answered beside six requests"
    limits(256, 300)
    assert most_connections(plain) == 172
    for hard, options in ((300, {"max_connections": 173}), (128, {})):
        limits(64, hard)
        with pytest.raises(TooFewDescriptors, match=f"`ulimit -Hn` is {hard}"):
            most_connections(make_config(**options))
