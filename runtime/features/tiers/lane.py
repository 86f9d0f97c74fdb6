"""A thread that runs tasks in order."""

import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Lock, get_native_id
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NICE = 19


def _lower_priority() -> None:
    """Lower this thread's priority below that of the kernels' threads, which wait for each other."""
    if sys.platform == "linux":  # elsewhere the priority of the whole process would change
        os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICE)


class Lane:
    """One thread of low priority, with a bounded queue.

    Attributes:
        queued_bytes: total size of the offered tasks that have not ended.
    """

    def __init__(self, name: str, most_bytes: int):
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"kv-{name}", initializer=_lower_priority)
        self._most_bytes = most_bytes
        self._lock = Lock()
        self.queued_bytes = 0

    def offer(self, size: int, task: Callable[[], None]) -> bool:
        """Queue a task; False if the queue has no room for its size."""
        with self._lock:
            if self.queued_bytes + size > self._most_bytes:
                return False
            self.queued_bytes += size
        try:
            self.run(partial(self._run, size, task))
        except RuntimeError:  # closed
            return False
        return True

    def _run(self, size: int, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:  # later tasks must still run
            logger.exception("a block of KV was not written")
        finally:
            with self._lock:
                self.queued_bytes -= size

    def run(self, task: Callable[[], T]) -> Future[T]:
        """Queue a task of any size."""
        return self._threads.submit(task)

    def wait(self, limit_s: float) -> None:
        """Wait until all queued tasks have ended, at most `limit_s` seconds."""
        wait([self.run(lambda: None)], limit_s)

    def finish(self) -> None:
        """Accept no more tasks; queued tasks still run."""
        self._threads.shutdown(wait=False)

    def close(self, limit_s: float) -> None:
        """Run queued tasks for at most `limit_s` seconds, and cancel the others."""
        self.wait(limit_s)
        self._threads.shutdown(wait=False, cancel_futures=True)
