"""Chat templates, rendered in processes that can be killed: nothing else bounds their time and memory."""

import atexit
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import msgspec

from runtime.errors import InvalidRequest, Overloaded
from runtime.models import template_program as program
from runtime.models.template_program import TEMPLATE_S


class TemplateRefused(InvalidRequest):
    """The chat template raises an error for these messages."""


class TemplateProcesses:
    """A pool of processes, each of which renders one template at a time. Thread-safe."""

    def __init__(self) -> None:
        self._all: set[subprocess.Popen[bytes]] = set()
        self._idle: list[subprocess.Popen[bytes]] = []

    def render(self, template: str, values: Mapping[str, Any] | None) -> str:
        """The text of a template with its variables, in JSON's types; None: only read the template, and return "".

        Raises:
            InvalidRequest: if the template cannot be read, or takes too long.
            TemplateRefused: if it refuses the values, or takes too much memory.
            Overloaded: if no process can be started.
        """
        try:
            request = msgspec.json.encode((template, values))
        except (UnicodeEncodeError, TypeError, ValueError) as error:
            raise TemplateRefused(f"the chat template takes no such messages: {error}", param="messages") from None
        try:
            process = self._take()
        except OSError:
            raise Overloaded("no process could be started to render the chat template") from None
        try:
            answer = self._ask(process, request)
        except BaseException:
            self._end(process)
            raise
        self._idle.append(process)
        kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
        if kind == program.UNREADABLE:
            raise InvalidRequest(f"the model's chat template cannot be read: {text}")
        if kind == program.REFUSED:
            raise TemplateRefused(f"the chat template refuses these messages: {text}", param="messages")
        return text

    def _ask(self, process: subprocess.Popen[bytes], request: bytes) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # its end is read below
            program.write_frame(process.stdin, request)
        if not wait([process.stdout.fileno()], TEMPLATE_S):
            raise InvalidRequest("the chat template takes too long with these messages", param="messages")
        answer = program.read_frame(process.stdout)
        if not answer:
            raise TemplateRefused("the chat template refuses these messages: it ended its process", param="messages")
        return answer

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
        command = [sys.executable, "-P", program.__file__]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._all.add(process)
        assert process.stdout is not None
        if not program.read_frame(process.stdout):  # imports do not count against the time limit
            self._end(process)
            raise OSError("it ended before it was ready")
        return process

    def close(self) -> None:
        """Kill all processes."""
        for process in list(self._all):
            self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._all.discard(process)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # it may hold a request that nobody reads any more
                pipe.close()


# Shared by all tokenizers of this process: templates come with each request.
PROCESSES = TemplateProcesses()
atexit.register(PROCESSES.close)
