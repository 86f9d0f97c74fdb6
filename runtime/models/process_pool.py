"""Processes for work whose time and memory nothing else bounds: they can be killed."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from runtime.errors import Overloaded


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

    @contextmanager
    def pipes(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Input and output of a process for one piece of work. An error within the context kills the process.

        Raises:
            Overloaded: if no process can be started.
        """
        try:
            process = self._take()
        except OSError:
            raise Overloaded(f"no process could be started to {self._purpose}") from None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdin, process.stdout
        except BaseException:
            self._end(process)
            raise
        self._idle.append(process)

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
        if process.poll() is None:
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
