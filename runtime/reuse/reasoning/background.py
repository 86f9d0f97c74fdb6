"""Work beside the engine's steps: one thread, few calls at a time, and a bounded share of a core."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any

log = logging.getLogger("ramet.engine")

# Of one core, in the long run; what may be saved up for a busy moment, seconds; calls that wait or run.
_SHARE, _BURST, _MOST = 0.05, 1.0, 64


class Background:
    """Runs calls in a thread, in order, and hands back their results when the engine asks.

    Attributes:
        seconds: CPU time of all calls so far.
    """

    def __init__(self, executor: Executor | None = None, clock: Callable[[], float] = time.monotonic):
        """`executor`: default: a thread, which begins with the first call and ends with this object."""
        self.seconds = 0.0
        self._executor = executor or ThreadPoolExecutor(1, "ramet-reasoning")
        self._clock = clock
        self._calls: deque[Future[tuple[Any, float]]] = deque()
        self._credit, self._at = _BURST, clock()

    def offer(self, call: Callable[[], Any]) -> bool:
        """Run a call; False if too many wait, or their time is used up. Returns at once."""
        now = self._clock()
        self._credit, self._at = min(_BURST, self._credit + _SHARE * (now - self._at)), now
        if len(self._calls) >= _MOST or self._credit <= 0:
            return False
        self._calls.append(self._executor.submit(_timed, call))
        return True

    def take(self) -> Iterator[Any]:
        """Results of ended calls, in order."""
        while self._calls and self._calls[0].done():
            ended = self._calls.popleft()
            if (error := ended.exception()) is not None:
                # The request goes on, exactly.
                log.error("reasoning steps could not be compared", exc_info=error)
                continue
            result, seconds = ended.result()
            self.seconds += seconds
            self._credit -= seconds
            yield result

    def wait(self) -> None:
        """Until all calls have ended; no step of a server does."""
        wait(self._calls)


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.thread_time()
    return call(), time.thread_time() - started
