"""Time of a call."""

import time
from collections.abc import Callable


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call, by any clock."""
    start = clock()
    work()
    return clock() - start
