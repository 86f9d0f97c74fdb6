"""Threads whose work goes in turns between accounts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Piece(Future[T]):
    """A piece of work; to cancel it before its turn comes skips it. A piece that runs goes on to its end.

    Attributes:
        account: whose turn it takes.
        began_s: when its turn came, on the monotonic clock; None before.
    """

    def __init__(self, account: Hashable, work: Callable[[], T]):
        super().__init__()
        self.account = account
        self.began_s: float | None = None
        self._work = work

    def do(self) -> None:
        self.began_s = time.monotonic()
        try:
            result = self._work()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)


class Turns:
    """A few threads for accounts that may each ask for any amount of work.

    Each account has a queue of its own. A thread takes a piece of one account, then a piece of the next one, so an
    account waits for no more than a piece of each other one, however much those have asked for. As no account has all
    the threads, it does not even wait for the pieces of a single other one.

    Args:
        threads: number of threads.
        name: of the threads.
        most: threads that one account may have at a time; default: all but one.
    """

    def __init__(self, threads: int, name: str, most: int | None = None):
        self._threads = threads
        self._most = most or max(threads - 1, 1)
        self._pool = ThreadPoolExecutor(threads, name)
        self._waiting: dict[Hashable, deque[Piece[Any]]] = {}  # by account, in the order of their turns
        self._running: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def submit(self, account: Hashable, work: Callable[[], T]) -> Piece[T]:
        """Queue a piece of work; short ones are fair to others."""
        piece = Piece(account, work)
        with self._lock:
            self._waiting.setdefault(account, deque()).append(piece)
            self._fill()
        return piece

    async def run(self, account: Hashable, work: Callable[[], T]) -> T:
        """The result of a piece of work, which is skipped if this task is cancelled before its turn."""
        return await asyncio.wrap_future(self.submit(account, work))

    def close(self) -> None:
        """Skip all that waits."""
        with self._lock:
            for piece in (piece for pieces in self._waiting.values() for piece in pieces):
                piece.cancel()
            self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        """Start pieces while there are threads for them."""
        while self._running.total() < self._threads:
            account = next((a for a in self._waiting if self._running[a] < self._most), None)
            if account is None:
                return
            pieces = self._waiting.pop(account)
            piece = pieces.popleft()
            if pieces:
                self._waiting[account] = pieces  # behind the others
            if piece.set_running_or_notify_cancel():
                self._running[account] += 1
                self._pool.submit(self._run, piece)

    def _run(self, piece: Piece[Any]) -> None:
        piece.do()
        with self._lock:
            self._running[piece.account] -= 1
            if not self._running[piece.account]:
                del self._running[piece.account]
            self._fill()
