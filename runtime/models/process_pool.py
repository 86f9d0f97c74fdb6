"""Processes for work whose time and memory nothing else bounds: they can be killed."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import IO

from runtime.errors import Overloaded

_TRIES = 2
# Seconds between two looks at whether a process still runs.
_LOOK_S = 0.2


class ProcessPool:
    """Processes of one Python program, each of which does one piece of work at a time. Thread-safe."""

    def __init__(self, purpose: str, arguments: list[str], read: Callable[[IO[bytes]], bytes]):
        """Start no process yet.

        Args:
            purpose: what a process is started for, as words for an error.
            arguments: of Python. The program writes one message when it is ready.
            read: reads a message of the program; empty: it has ended.
        """
        self._purpose, self._command, self._read = purpose, [sys.executable, "-P", *arguments], read
        self._all: set[subprocess.Popen[bytes]] = set()
        self._idle: list[subprocess.Popen[bytes]] = []

    def ask(self, write: Callable[[IO[bytes]], object], timeout_s: float) -> bytes | None:
        """The answer to what `write` writes; None: it took longer than `timeout_s`; empty: its process has ended.

        Whoever was stopped meanwhile (SIGSTOP) is replaced, and the work begins anew.

        Raises:
            Overloaded: if no process can be started, or one after the other is stopped.
        """
        for _ in range(_TRIES):
            try:
                process = self._take()
            except OSError:
                raise Overloaded(f"no process could be started to {self._purpose}") from None
            answer, was_stopped = None, False
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                with suppress(BrokenPipeError):  # its end is read below
                    write(process.stdin)
                until_s, left_s = time.monotonic() + timeout_s, timeout_s
                while not (was_stopped or wait([process.stdout.fileno()], min(left_s, _LOOK_S))) and left_s > 0:
                    was_stopped, left_s = _is_stopped(process), max(until_s - time.monotonic(), 0.0)
                if not was_stopped and wait([process.stdout.fileno()], 0):
                    answer = self._read(process.stdout)
            finally:
                if answer:
                    self._idle.append(process)
                else:
                    self._end(process)
            if not was_stopped:
                return answer
        raise Overloaded(f"the processes that {self._purpose} are stopped")

    def close(self) -> None:
        """Kill all processes; work that is being done fails as if its process had ended."""
        for process in list(self._all):  # whoever waits for one still reads its pipes
            process.kill()
            process.wait()

    def forget(self) -> None:
        """Kill the idle processes, each of which may still have what it worked on last."""
        with suppress(IndexError):
            while True:
                self._end(self._idle.pop())

    def _take(self) -> subprocess.Popen[bytes]:
        try:
            process = self._idle.pop()
        except IndexError:
            return self._start()
        if process.poll() is None and not _is_stopped(process):
            return process
        self._end(process)
        return self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._all.add(process)
        assert process.stdout is not None
        if not self._read(process.stdout):  # imports do not count against the time limit of the work
            self._end(process)
            raise OSError("it ended before it was ready")
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._all.discard(process)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # it may hold a request that nobody reads any more
                pipe.close()


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether a signal has stopped a process of ours, which then neither works nor ends."""
    try:
        found, status = os.waitpid(process.pid, os.WNOHANG | os.WUNTRACED)
    except ChildProcessError:
        return False
    return found != 0 and os.WIFSTOPPED(status)
