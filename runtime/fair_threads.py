"""A thread pool that accounts share fairly."""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Piece(Future[T]):
    """A task. Cancelling skips it before it starts; a running task continues to its end, or gives up.

    Attributes:
        account: the account that submitted it.
        work: the task itself.
        is_wanted: whether it was not cancelled, see `give_up_if_unwanted`.
        began_s: start time on the monotonic clock; None before.
    """

    def __init__(self, account: Hashable, work: Callable[[], T]):
        super().__init__()
        self.account = account
        self.began_s: float | None = None
        self.work = work
        self.is_wanted = True

    def cancel(self) -> bool:
        self.is_wanted = False
        return super().cancel()


_own = threading.local()


def give_up_if_unwanted() -> None:
    """Raise CancelledError in a task that was cancelled. Long tasks call this between their parts."""
    piece: Piece[Any] | None = getattr(_own, "piece", None)
    if piece is not None and not piece.is_wanted:
        raise CancelledError


class FairThreads:
    """A few threads for accounts that may each submit any amount of work.

    Each account has a queue, and threads serve the queues round-robin: an account waits for at most one task of each
    other account. No account occupies all threads, so it never waits for a single busy account.

    Args:
        threads: number of threads.
        name: prefix of the threads' names.
        most: threads that one account may occupy; default: all but one.
    """

    def __init__(self, threads: int, name: str, most: int | None = None):
        self._threads = threads
        self._most = most or max(threads - 1, 1)
        self._pool = ThreadPoolExecutor(threads, name)
        self._waiting: dict[Hashable, deque[Piece[Any]]] = {}  # by account, in round-robin order
        self._running: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def submit(self, account: Hashable, work: Callable[[], T]) -> Piece[T]:
        """Queue a task; keep tasks short, for fairness."""
        piece = Piece(account, work)
        with self._lock:
            self._waiting.setdefault(account, deque()).append(piece)
            self._fill()
        return piece

    async def run(self, account: Hashable, work: Callable[[], T]) -> T:
        """The result of a task, which is skipped if the caller is cancelled before it starts, and then may give up."""
        return await asyncio.wrap_future(self.submit(account, work))

    def close(self) -> None:
        """Cancel all queued tasks."""
        with self._lock:
            for piece in (piece for pieces in self._waiting.values() for piece in pieces):
                piece.cancel()
            self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        """Start queued tasks while threads are free."""
        while self._running.total() < self._threads:
            account = next((a for a in self._waiting if self._running[a] < self._most), None)
            if account is None:
                return
            pieces = self._waiting.pop(account)
            piece = pieces.popleft()
            if pieces:
                self._waiting[account] = pieces  # at the end of the round
            if piece.set_running_or_notify_cancel():
                self._running[account] += 1
                try:
                    self._pool.submit(self._run, piece)
                except RuntimeError as error:  # no thread could be started
                    self._running[account] -= 1
                    piece.set_exception(error)

    def _run(self, piece: Piece[Any]) -> None:
        piece.began_s, _own.piece = time.monotonic(), piece
        try:
            piece.set_result(piece.work())
        except BaseException as error:
            piece.set_exception(error)
        _own.piece = None
        with self._lock:
            self._running[piece.account] -= 1
            if not self._running[piece.account]:
                del self._running[piece.account]
            self._fill()
