"""Work in turns: against a plain reading, and under floods that never end."""

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.fair_threads import FairThreads, give_up_if_unwanted


@pytest.fixture
def gate():
    """An event that pieces wait for; set at the end, so that no thread is left."""
    gate = threading.Event()
    yield gate
    gate.set()


def in_turns(asked: list[str]) -> list[int]:
    """The order of one thread: a piece of each account, again and again."""
    queues: dict[str, list[int]] = {}
    for i, account in enumerate(asked):
        queues.setdefault(account, []).append(i)
    order = []
    while queues:
        account, (first, *rest) = next(iter(queues.items()))
        del queues[account]
        order.append(first)
        if rest:
            queues[account] = rest
    return order


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=20), st.sets(st.integers(0, 19)))
def test_accounts_take_turns(asked, left):
    threads, started, done = FairThreads(1, "test"), threading.Event(), []
    threads.submit("first", started.wait)
    pieces = [threads.submit(account, lambda i=i: done.append(i)) for i, account in enumerate(asked)]
    for i, piece in enumerate(pieces):
        assert i not in left or piece.cancel(), "its turn has not come"
    started.set()
    for i, piece in enumerate(pieces):
        if i not in left:
            piece.result(60)
    threads.close()
    assert done == [i for i in in_turns(asked) if i not in left]


def test_an_account_that_floods_leaves_a_thread_to_the_others(gate):
    threads = FairThreads(3, "test")
    for _ in range(100):
        threads.submit("flood", gate.wait)
    assert threads.submit("other", lambda: "done").result(60) == "done"
    other = [threads.submit("other", gate.wait), threads.submit("third", lambda: "done")]
    assert not other[1].done(), "two accounts have all threads"
    gate.set()
    assert other[1].result(60) == "done"
    threads.close()


def test_whoever_leaves_before_the_turn_costs_nothing(gate):
    async def main() -> None:
        threads = FairThreads(1, "test")
        busy, begun = threads.submit("a", gate.wait), []
        tasks = [asyncio.create_task(threads.run("a", lambda: begun.append(1))) for _ in range(50)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gate.set()
        await threads.run("a", lambda: None)
        assert (busy.result(), begun) == (True, [])
        threads.close()

    asyncio.run(main())


def test_an_error_is_the_callers_and_ends_no_thread():
    threads = FairThreads(1, "test")
    assert isinstance(threads.submit("a", lambda: 1 // 0).exception(60), ZeroDivisionError)
    assert threads.submit("a", lambda: 1).result(60) == 1
    assert not threads._running
    threads.close()


def test_nobody_waits_for_threads_that_are_closed(gate):
    threads = FairThreads(1, "test")
    threads.submit("a", gate.wait)
    waiting = threads.submit("b", lambda: None)
    threads.close()
    assert waiting.cancelled()


def test_a_thread_that_cannot_be_started_costs_no_place(monkeypatch):
    threads = FairThreads(1, "test")
    with monkeypatch.context() as patched:
        patched.setattr(
            threads._pool, "submit", lambda *_: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        failed = threads.submit("a", lambda: 1)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        failed.result(60)
    assert threads.submit("a", lambda: 2).result(60) == 2
    threads.close()


def test_a_running_task_gives_up_once_its_caller_is_cancelled(gate):
    threads, started, done = FairThreads(1, "test"), threading.Event(), []

    def work() -> None:
        started.set()
        gate.wait(60)
        give_up_if_unwanted()
        done.append("all of it")

    async def leave() -> None:
        task = asyncio.ensure_future(threads.run("a", work))
        await asyncio.to_thread(started.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    gate.set()
    threads.submit("a", give_up_if_unwanted).result(60)
    assert done == []
