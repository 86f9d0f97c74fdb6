"""A store that fails costs bounded time, is left alone, and is tried again."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from runtime.kv.tiers import guard
from runtime.kv.tiers.guard import GuardedStore, Rate
from runtime.kv.tiers.store import Usage
from tests.runtime.kv.tiers.conftest import FlakyStore

KEY = bytes(16)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def guarded(flaky, clock):
    return GuardedStore(flaky, clock)


def test_calls_pass_and_are_counted(guarded):
    assert guarded.get(KEY) is None
    assert guarded.put(KEY, [b"ab", memoryview(b"c")], "a", "evicted")
    assert guarded.contains_many([KEY, b"1" * 16]) == [True, False]
    assert guarded.get(KEY) == b"abc"
    assert not guarded.put(KEY, [bytes(2 << 20)], "a", "evicted")
    assert guarded.usage() == guarded.last_usage == Usage(3, 1, 1 << 20)
    guarded.touch([KEY])
    guarded.delete([KEY])
    assert guarded.get(KEY) is None
    counts = {"misses": 2, "hits": 1, "bytes_read": 3, "written": 1, "bytes_written": 3, "refused": 1}
    assert dict(guarded.counts) == counts


def test_a_failure_shuts_the_gate_for_a_while_that_grows(guarded, flaky, clock):
    flaky.error = OSError("broken")
    pauses = []
    for _ in range(7):
        assert guarded.get(KEY) is None
        assert not guarded.is_open
        begun = clock.now
        calls = len(flaky.calls)
        assert guarded.contains_many([KEY]) == [False]
        assert len(flaky.calls) == calls, "it was called in the pause"
        while not guarded.is_open:
            clock.now += 0.5
        pauses.append(clock.now - begun)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert guarded.counts["failed"] == 7
    assert guarded.counts["skipped"] == 7
    flaky.error = None
    assert guarded.contains_many([KEY]) == [False]
    flaky.error = OSError("again")
    guarded.get(KEY)
    clock.now += 1
    assert guarded.is_open, "a success ends the growth"


def test_a_store_that_cannot_be_written_is_still_read(guarded, flaky):
    assert guarded.put(KEY, [b"x"], "", "evicted")
    flaky.error = OSError("no space left")
    assert not guarded.put(KEY, [b"y"], "", "evicted")
    flaky.error = None
    assert guarded.get(KEY) == b"x"
    assert not guarded.put(KEY, [b"y"], "", "evicted")
    assert (guarded.counts["failed"], guarded.counts["skipped"], guarded.counts["refused"]) == (1, 1, 0)


def test_a_failure_warns_once_until_the_store_answers_again(guarded, flaky, clock, caplog, logged_here):
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        flaky.error = OSError("broken")
        for _ in range(5):
            guarded.get(KEY)
            guarded.put(KEY, [b"x"], "", "evicted")
            clock.now += 60
        flaky.error = None
        guarded.get(KEY)
        guarded.put(KEY, [b"x"], "", "evicted")
    assert [record.getMessage() for record in logged_here()] == [
        "KV tier disk fails, and is tried again later: broken"
    ] * 2


def test_calls_that_hang_hold_no_further_ones(flaky, clock, monkeypatch):
    monkeypatch.setattr(guard, "WAIT_S", 0.05)
    guarded = GuardedStore(flaky, clock)
    flaky.gate.clear()
    threads = [threading.Thread(target=guarded.get, args=[KEY]) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(flaky.calls) < 4:
        time.sleep(0.001)
    assert guarded.get(KEY) is None
    assert not guarded.is_open
    assert len(flaky.calls) == 4
    assert guarded.get(KEY) is None
    assert guarded.counts["failed"] == guarded.counts["skipped"] == 1
    flaky.gate.set()
    for thread in threads:
        thread.join()


def test_an_erasure_that_failed_comes_before_all_else(guarded, flaky, clock):
    other = b"1" * 16
    guarded.put(KEY, [b"x"], "alice", "evicted")
    guarded.put(other, [b"y"], "bob", "evicted")
    flaky.error = OSError("broken")
    assert guarded.erase("alice") is None
    assert guarded.erase("carol") is None, "even while the gate is shut, it is tried"
    clock.now += 60
    flaky.error = None
    assert guarded.get(KEY) is None
    assert guarded.get(other) == b"y"
    assert flaky.calls[-4:] == ["erase", "erase", "get", "get"]
    assert guarded.erase(None) == 1
    assert guarded.erase("alice") == 0


def test_a_rate_is_measured_and_forgotten(clock):
    rate = Rate(0.001, 1e-9, clock)
    assert rate.now() == (0.001, 1e-9)
    for _ in range(50):
        rate.measure(latency_s=0.1)
        rate.measure(s_per_byte=1e-6)
    assert rate.now() == pytest.approx((0.1, 1e-6), rel=1e-3)
    clock.now += 60
    assert rate.now() == pytest.approx((0.0505, 0.5005e-6), rel=1e-3)
    clock.now += 6000
    assert rate.now() == pytest.approx((0.001, 1e-9), rel=1e-3)


def test_reads_are_measured(clock):
    store = FlakyStore()
    guarded = GuardedStore(store, clock)
    guarded.put(KEY, [bytes(1000)], "", "evicted")
    held = store.get

    def slow(key):
        clock.now += 1.0
        return held(key)

    store.get = slow
    guarded.get(KEY)
    _, per_byte = guarded.rate.now()
    assert per_byte == pytest.approx(1e-9 + 0.3 * (1e-3 - 1e-9))
