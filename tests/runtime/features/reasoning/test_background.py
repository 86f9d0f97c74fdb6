"""Calls in a thread: in order, few at a time, within their share of a core."""

import threading
import time

from runtime.features.reasoning import background
from runtime.features.reasoning.background import Background
from tests.runtime.features.reasoning.driver import AtOnce


def spin(seconds: float) -> str:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return "done"


def test_calls_run_in_another_thread_in_order_and_nobody_waits():
    work, release = Background(), threading.Event()
    assert work.offer(lambda: (release.wait(60), threading.current_thread())[1])
    assert work.offer(lambda: "second")
    assert list(work.take()) == []
    release.set()
    work.wait()
    thread, second = work.take()
    assert thread is not threading.current_thread()
    assert second == "second"


def test_no_more_than_some_wait():
    work, release = Background(), threading.Event()
    taken = [work.offer(lambda: release.wait(60)) for _ in range(background._MOST + 5)]
    assert taken == [True] * background._MOST + [False] * 5
    release.set()
    work.wait()
    assert len(list(work.take())) == background._MOST
    assert work.offer(lambda: None)


def test_cpu_time_is_counted_and_bounded(monkeypatch):
    monkeypatch.setattr(background, "_BURST", 0.05)
    now = 100.0
    work = Background(AtOnce(), clock=lambda: now)
    assert work.offer(lambda: spin(0.04))
    assert work.offer(lambda: spin(0.03))
    assert list(work.take()) == ["done", "done"]
    assert work.seconds >= 0.07
    spent = work.seconds
    assert not work.offer(lambda: spin(0))
    # What was spent beyond the credit comes back with time.
    now += 0.99 * (spent - 0.05) / background._SHARE
    assert not work.offer(lambda: spin(0))
    now += 0.02 * (spent - 0.05) / background._SHARE
    assert work.offer(lambda: spin(0))


def test_credit_is_not_saved_up_for_ever():
    now = 0.0
    work = Background(AtOnce(), clock=lambda: now)
    now = 1e6
    assert work.offer(lambda: None)
    assert work._credit <= background._BURST


def test_a_call_that_fails_is_logged_and_the_next_one_runs(caplog):
    work = Background(AtOnce())
    work.offer(lambda: 1 / 0)
    work.offer(lambda: "next")
    assert list(work.take()) == ["next"]
    assert "ZeroDivisionError" in caplog.text
