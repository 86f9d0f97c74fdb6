"""Messages to and from one engine, and the process in which it runs."""

import asyncio
import logging
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar, cast

import msgspec
import zmq

from runtime.calls import AnyCall, EngineCall
from runtime.config import Config
from runtime.errors import EngineDead, ModelError
from runtime.models.publishing import scratch
from runtime.protocol import (
    Boot,
    CallEngine,
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

log = logging.getLogger("ramet.client")

A = TypeVar("A")

# Most messages to handle before other work of the event loop.
_TOGETHER = 64


class Host(ABC):
    """Runs an engine, and carries its messages."""

    @property
    def error(self) -> EngineDead | None:
        """Why the engine has died; None if unknown."""
        return None

    @abstractmethod
    def starting(self, path: Path, take: Callable[[Outbound], None]) -> AbstractAsyncContextManager[None]:
        """Start the engine of the model directory `path`; exit this context once it is ready; `take` gets messages."""

    @abstractmethod
    def send(self, message: Inbound) -> None:
        """Send the engine a message. The message is lost if the engine has ended."""

    @abstractmethod
    async def wait(self) -> int:
        """Wait for the engine's end; returns its exit code."""

    @abstractmethod
    def kill(self) -> None:
        """End the engine at once."""

    def close(self) -> None:  # noqa: B027 - a thread leaves nothing
        """Release what carried the messages of an engine that has ended."""


class EngineProcess(Host):
    """Runs an engine in a process of its own, behind two ZeroMQ sockets."""

    def __init__(self, config: Config, quotas: Mapping[str, int]):
        self._config, self._quotas = config, dict(quotas)
        self._closing = ExitStack()
        self.process: asyncio.subprocess.Process | None = None

    @asynccontextmanager
    async def starting(self, path: Path, take: Callable[[Outbound], None]) -> AsyncIterator[None]:
        context, self._take = zmq.Context(), take
        self._closing.callback(context.destroy, linger=0)
        self._inbox, self._outbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        # Only the owner may enter the directory, so its sockets are private; once connected, they need no names.
        with scratch(Path(tempfile.gettempdir()), "ramet-sockets-") as directory:
            inbox, outbox = f"ipc://{directory / 'inbox'}", f"ipc://{directory / 'outbox'}"
            for socket, endpoint in ((self._inbox, inbox), (self._outbox, outbox)):
                socket.set_hwm(0)
                socket.setsockopt(zmq.LINGER, 0)
                socket.bind(endpoint)
            command = (sys.executable, "-P", "-m", "runtime.process")
            self.process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
            boot = Boot(self._config.model_dump_json(), str(path), self._quotas, inbox, outbox)
            assert self.process.stdin is not None
            self.process.stdin.write(msgspec.json.encode(boot) + b"\n")
            loop, descriptor = asyncio.get_running_loop(), self._outbox.FD
            loop.add_reader(descriptor, self._read)
            self._closing.callback(loop.remove_reader, descriptor)
            self._read()
            yield

    def send(self, message: Inbound) -> None:
        # A send never blocks as long as there is a peer. If the engine has just died, the message is lost with it.
        with suppress(zmq.Again):
            self._inbox.send(encode(message), zmq.NOBLOCK)

    def _read(self) -> None:
        """Take messages. The descriptor is edge-triggered, so all must be taken before it can be waited for."""
        for _ in range(_TOGETHER):
            if self._outbox.closed:
                return
            try:
                message: Outbound = outbound_decoder.decode(self._outbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except msgspec.MsgspecError:
                log.exception("the engine sent a message that cannot be read")
                return self.kill()  # its requests would wait for ever
            self._take(message)
        asyncio.get_running_loop().call_soon(self._read)

    async def wait(self) -> int:
        assert self.process is not None
        return await self.process.wait()

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()

    def close(self) -> None:
        self._closing.close()


class EngineConnection:
    """Messages of one engine, from its start to its end. Used from one event loop.

    Attributes:
        on_events: called with the events of each step.
        dead: the error with which calls are refused; None: calls are accepted.
        ended: the engine's exit code; None before the start.
    """

    def __init__(self, host: Host):
        self._host = host
        self.on_events: Callable[[list[TokenEvent]], None] = lambda events: None
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._num_calls = 0
        self.dead: EngineDead | None = EngineDead("the engine is not running")
        self.ended: asyncio.Task[int] | None = None

    async def open(self, path: Path) -> ModelInfo:
        """Start the engine of the model directory `path`. Raises ModelError if it cannot be started."""
        self._ready: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        try:
            async with self._host.starting(path, self._take):
                self.ended = asyncio.create_task(self._host.wait())
                info = await self._await_ready(self.ended)
        except (OSError, zmq.ZMQError) as error:
            raise ModelError(f"the engine process cannot be started: {error}") from None
        self.dead = None
        return info

    async def _await_ready(self, ended: asyncio.Task[int]) -> ModelInfo:
        try:
            await asyncio.wait((self._ready, ended), return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.done():
                # The engine may have sent an error message just before it ended.
                await asyncio.wait((self._ready,), timeout=0.5)
            if not self._ready.done():
                raise ModelError(f"the engine process ended with code {ended.result()} before it was ready")
            return self._ready.result()
        except BaseException:
            self._host.kill()
            await ended
            raise

    async def call(self, call: EngineCall[A]) -> A:
        """The answer to an operator's call. Raises RametError if it fails; cancelling the task cancels the call."""
        if self.dead is not None:
            raise self.dead
        self._num_calls += 1
        number = self._num_calls
        self._calls[number] = future = asyncio.get_running_loop().create_future()
        self._host.send(CallEngine(number, cast(AnyCall, call)))
        try:
            return (await future).read(call)
        except asyncio.CancelledError:
            self._host.send(Forget(number))
            raise
        finally:
            self._calls.pop(number, None)

    def fail(self, error: EngineDead) -> None:
        """End all open calls with `error`, and refuse new calls."""
        self.dead = self.dead or error
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)

    def _take(self, message: Outbound) -> None:
        if isinstance(message, StepEvents):
            self.on_events(message.events)
        elif isinstance(message, Reply):
            self._answer(message)
        elif isinstance(message, Ready):
            self._ready.set_result(message.info)
        else:
            self._ready.set_exception(ModelError(message.message))

    def _answer(self, reply: Reply) -> None:
        call = self._calls.get(reply.number)
        if call is not None and not call.done():
            call.set_result(reply)
