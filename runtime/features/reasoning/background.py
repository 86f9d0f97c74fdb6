"""A background thread for work beside the engine's steps, with a short queue and a bounded share of a core."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger("ramet.engine")

# Long-term share of one core; largest burst in CPU seconds; most calls that wait or run.
_SHARE, _BURST, _MOST = 0.05, 1.0, 64


class Background(Generic[T]):
    """Runs calls in a thread, in order. The engine collects the results with `take`.

    Attributes:
        seconds: CPU time of all collected calls.
    """

    def __init__(self, executor: Executor | None = None, clock: Callable[[], float] = time.monotonic):
        """`executor`: runs the calls; default: one thread, which starts with the first call."""
        self.seconds = 0.0
        self._executor = executor or ThreadPoolExecutor(1, "ramet-reasoning")
        self._clock = clock
        self._calls: deque[Future[tuple[T, float]]] = deque()
        self._credit, self._at = _BURST, clock()

    def offer(self, call: Callable[[], T]) -> bool:
        """Queue a call without waiting; False if the queue is full or the CPU time is used up."""
        now = self._clock()
        self._credit, self._at = min(_BURST, self._credit + _SHARE * (now - self._at)), now
        if len(self._calls) >= _MOST or self._credit <= 0:
            return False
        self._calls.append(self._executor.submit(_timed, call))
        return True

    def take(self) -> Iterator[T]:
        """The results of finished calls, in order. A failed call is logged and skipped."""
        while self._calls and self._calls[0].done():
            ended = self._calls.popleft()
            if (error := ended.exception()) is not None:
                # The request continues without sharing these pages.
                log.error("reasoning steps could not be compared", exc_info=error)
                continue
            result, seconds = ended.result()
            self.seconds += seconds
            self._credit -= seconds
            yield result

    def wait(self) -> None:
        """Wait for all calls. For tests and benches: a server never waits."""
        wait(self._calls)


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    started = time.thread_time()
    return call(), time.thread_time() - started
