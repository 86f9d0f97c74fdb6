"""A store that fails costs bounded time, is left alone, and is tried again."""

import logging
import threading
import time

import pytest

from runtime.features.tiers import tier as module
from runtime.features.tiers.store import Usage
from runtime.features.tiers.tier import Rate, Tier
from tests.runtime.features.tiers.conftest import FlakyStore, blocks_of

BLOCK, OTHER = blocks_of("alice", 2)
BOBS = blocks_of("bob", 1)[0]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tier(flaky, clock):
    return Tier(flaky, clock=clock)


def test_calls_pass_and_are_counted(tier):
    assert tier.get(BLOCK) is None
    tier.put(BLOCK, [b"ab", memoryview(b"c")])
    assert tier.contains_many([BLOCK.key, OTHER.key]) == [True, False]
    assert tier.get(BLOCK) == b"abc"
    tier.put(OTHER, [bytes(2 << 20)])
    assert tier.usage() == tier.last_usage == Usage(3, 1, 1 << 20)
    tier.touch([BLOCK.key])
    tier.delete([BLOCK.key])
    assert tier.get(BLOCK) is None
    counts = {"misses": 2, "hits": 1, "bytes_read": 3, "written": 1, "bytes_written": 3, "refused": 1}
    assert dict(tier.counts) == counts


def test_a_failure_shuts_the_gate_for_a_while_that_grows(tier, flaky, clock):
    flaky.error = OSError("broken")
    pauses = []
    for _ in range(7):
        assert tier.get(BLOCK) is None
        assert not tier.is_open
        begun = clock.now
        calls = len(flaky.calls)
        assert tier.contains_many([BLOCK.key]) == [False]
        assert len(flaky.calls) == calls, "it was called in the pause"
        while not tier.is_open:
            clock.now += 0.5
        pauses.append(clock.now - begun)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert tier.counts["failed"] == 7
    assert tier.counts["skipped"] == 7
    flaky.error = None
    assert tier.contains_many([BLOCK.key]) == [False]
    flaky.error = OSError("again")
    tier.get(BLOCK)
    clock.now += 1
    assert tier.is_open, "a success ends the growth"


def test_a_store_that_cannot_be_written_is_still_read(tier, flaky):
    tier.put(BLOCK, [b"x"])
    flaky.error = OSError("no space left")
    tier.put(BLOCK, [b"y"])
    flaky.error = None
    assert tier.get(BLOCK) == b"x"
    tier.put(BLOCK, [b"y"])
    counts = tier.counts
    assert (counts["written"], counts["failed"], counts["skipped"], counts["refused"]) == (1, 1, 1, 0)


def test_a_failure_warns_once_until_the_store_answers_again(tier, flaky, clock, caplog, logged_here):
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        flaky.error = OSError("broken")
        for _ in range(5):
            tier.get(BLOCK)
            tier.put(BLOCK, [b"x"])
            clock.now += 60
        flaky.error = None
        tier.get(BLOCK)
        tier.put(BLOCK, [b"x"])
    assert [record.getMessage() for record in logged_here()] == [
        "KV tier disk fails and is tried again later: broken"
    ] * 2


def test_calls_that_hang_hold_no_further_ones(tier, flaky, monkeypatch):
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    flaky.gate.clear()
    threads = [threading.Thread(target=tier.get, args=[BLOCK]) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(flaky.calls) < 4:
        time.sleep(0.001)
    assert tier.get(BLOCK) is None
    assert not tier.is_open
    assert len(flaky.calls) == 4
    assert tier.get(BLOCK) is None
    assert tier.counts["failed"] == tier.counts["skipped"] == 1
    flaky.gate.set()
    for thread in threads:
        thread.join()


def test_an_erasure_that_failed_comes_before_all_else(tier, flaky, clock):
    tier.put(BLOCK, [b"x"])
    tier.put(BOBS, [b"y"])
    flaky.error = OSError("broken")
    assert tier.erase("alice") is None
    assert tier.erase("carol") is None, "even while the gate is shut, it is tried"
    clock.now += 60
    flaky.error = None
    assert tier.get(BLOCK) is None
    assert tier.get(BOBS) == b"y"
    assert flaky.calls[-4:] == ["erase", "erase", "get", "get"]
    assert tier.erase(None) == 1
    assert tier.erase("alice") == 0


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
    tier = Tier(store, clock=clock)
    tier.put(BLOCK, [bytes(1000)])
    get = store.get

    def slow(key):
        clock.now += 1.0
        return get(key)

    store.get = slow
    tier.get(BLOCK)
    _, per_byte = tier.rate.now()
    assert per_byte == pytest.approx(1e-9 + 0.3 * (1e-3 - 1e-9))
