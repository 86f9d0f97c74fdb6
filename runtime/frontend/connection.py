"""Messages to and from one engine, over two ZeroMQ sockets, and the process in which it runs."""

import asyncio
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

from runtime.calls import Call
from runtime.config import Config
from runtime.errors import EngineDead, ModelError
from runtime.models.publishing import scratch
from runtime.protocol import (
    Ask,
    Failed,
    Forget,
    Inbound,
    ModelInfo,
    Outbound,
    Ready,
    Reply,
    StepEvents,
    TokenEvent,
    encode,
    outbound_decoder,
)

# Messages that are taken before other work of the event loop.
_TOGETHER = 64


class Host(ABC):
    """Runs an engine."""

    @property
    def error(self) -> EngineDead | None:
        """Why the engine has died, if that is known."""
        return None

    @abstractmethod
    def endpoints(self) -> AbstractContextManager[tuple[str, str]]:
        """New ZeroMQ addresses of the engine's inbox and outbox; once connected, they need no names."""

    @abstractmethod
    async def start(self, context: zmq.Context, path: Path, inbox: str, outbox: str) -> None:
        """Start the engine of the model directory `path`, which connects to its inbox and outbox."""

    @abstractmethod
    async def wait(self) -> int:
        """Wait for the engine's end; its exit code."""

    @abstractmethod
    def kill(self) -> None:
        """End the engine at once."""


class Boot(msgspec.Struct):
    """The first line on an engine process's standard input.

    Attributes:
        config: JSON of a `Config`.
        path: the model's directory.
        inbox, outbox: ZeroMQ addresses.
    """

    config: str
    path: str
    quotas: dict[str, int]
    inbox: str
    outbox: str


class EngineProcess(Host):
    """Runs an engine in a process of its own."""

    def __init__(self, config: Config, quotas: Mapping[str, int]):
        self._config, self._quotas = config, dict(quotas)
        self.process: asyncio.subprocess.Process | None = None

    @contextmanager
    def endpoints(self) -> Iterator[tuple[str, str]]:
        # Only the owner may enter the directory, so its sockets are private.
        with scratch(Path(tempfile.gettempdir()), "ramet-sockets-") as directory:
            yield f"ipc://{directory / 'inbox'}", f"ipc://{directory / 'outbox'}"

    async def start(self, context: zmq.Context, path: Path, inbox: str, outbox: str) -> None:
        command = (sys.executable, "-P", "-m", "runtime.engine.process")
        self.process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        boot = Boot(self._config.model_dump_json(), str(path), self._quotas, inbox, outbox)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(boot) + b"\n")

    async def wait(self) -> int:
        assert self.process is not None
        return await self.process.wait()

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()


class Connection:
    """One engine, from its start to its end. Used from one event loop.

    Attributes:
        on_events: called with the events of each step.
        dead: why calls are refused; None: they are not.
        ended: the engine's exit code; None before the start.
    """

    def __init__(self, host: Host):
        self._host = host
        self.on_events: Callable[[list[TokenEvent]], None] = lambda events: None
        self._context = zmq.Context()
        self._inbox, self._outbox = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_calls = 0
        self.dead: EngineDead | None = None
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[ModelInfo] = self._loop.create_future()
        self.ended: asyncio.Task[int] | None = None

    async def open(self, path: Path) -> ModelInfo:
        """Start the engine of the model directory `path`. Raises ModelError if it cannot be started."""
        try:
            with self._host.endpoints() as endpoints:
                for socket, endpoint in zip((self._inbox, self._outbox), endpoints, strict=True):
                    socket.set_hwm(0)
                    socket.setsockopt(zmq.LINGER, 0)
                    socket.bind(endpoint)
                await self._host.start(self._context, path, *endpoints)
                self.ended = asyncio.create_task(self._host.wait())
                self._loop.add_reader(self._outbox.FD, self._read)
                return await self._await_ready(self.ended)
        except (OSError, zmq.ZMQError) as error:
            raise ModelError(f"the engine process cannot be started: {error}") from None

    async def _await_ready(self, ended: asyncio.Task[int]) -> ModelInfo:
        self._read()
        try:
            await asyncio.wait((self._ready, ended), return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.done():
                # The engine may have sent its reason just before it ended.
                await asyncio.wait((self._ready,), timeout=0.5)
            if not self._ready.done():
                raise ModelError(f"the engine process ended with code {ended.result()} before it was ready")
            return self._ready.result()
        except BaseException:
            self._host.kill()
            await ended
            raise

    def send(self, message: Inbound) -> None:
        # A send never blocks as long as there is a peer. If the engine has just died, the message is lost with it.
        with suppress(zmq.Again):
            self._inbox.send(encode(message), zmq.NOBLOCK)

    async def call(self, call: Call) -> dict[str, Any]:
        """The answer to an operator's call. Raises RametError if it fails; cancelling gives it up."""
        if self.dead is not None:
            raise self.dead
        self._num_calls += 1
        number, future = self._num_calls, self._loop.create_future()
        self._calls[number] = future
        self.send(Ask(number, call))
        try:
            answer: dict[str, Any] = await future
            return answer
        except asyncio.CancelledError:
            self.send(Forget(number))
            raise
        finally:
            self._calls.pop(number, None)

    def fail(self, error: EngineDead) -> None:
        """End all calls, and refuse new ones."""
        self.dead = self.dead or error
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)

    def kill(self) -> None:
        self._host.kill()

    def close(self) -> None:
        """Close the sockets."""
        if not self._outbox.closed:
            self._loop.remove_reader(self._outbox.FD)
        self._context.destroy(linger=0)

    def _read(self) -> None:
        """Take messages. The descriptor is edge-triggered, so all must be taken before it can be waited for."""
        for _ in range(_TOGETHER):
            try:
                message: Outbound = outbound_decoder.decode(self._outbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(message, StepEvents):
                self.on_events(message.events)
            elif isinstance(message, Reply):
                self._answer(message)
            elif isinstance(message, Ready):
                self._ready.set_result(message.info)
            elif isinstance(message, Failed):
                self._ready.set_exception(ModelError(message.message))
            if self._outbox.closed:
                return
        self._loop.call_soon(self._read)

    def _answer(self, reply: Reply) -> None:
        call = self._calls.get(reply.number)
        if call is None or call.done():
            return
        if reply.failure is None:
            call.set_result(reply.answer)
        else:
            call.set_exception(reply.failure.error())
