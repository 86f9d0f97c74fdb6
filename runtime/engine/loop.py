"""The engine's loop: messages in, steps, messages out. It runs in a process of its own or in a thread."""

import asyncio
import logging
import queue
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from runtime.engine.core import EngineCore
from runtime.errors import EngineDead, RametError
from runtime.execution.device import is_out_of_memory
from runtime.protocol import (
    AddRequest,
    Failed,
    Inbound,
    Outbound,
    Ready,
    Sampling,
    Shutdown,
    StepEvents,
    TokenEvent,
    encode,
    inbound_decoder,
)

log = logging.getLogger("ramet.engine")

# Wait for messages if there are requests but no step to run: all requests wait for a grammar or a tier.
_NOTHING_TO_RUN_MS = 5
# Longest time for messages before a step: a stream of requests that are refused at once could delay it for ever.
_MESSAGES_S = 0.02
_TOO_LITTLE = "the model does not fit into the memory that is left, or that a limit (`ulimit -v`, a container's) allows"


class EngineLoop:
    """Receives messages, runs an engine's steps, and sends the engine's messages.

    Args:
        receive: returns the next message, or None if none comes within the given milliseconds (None: no limit).
        send: sends a message of the engine.
    """

    def __init__(self, receive: Callable[[int | None], Inbound | None], send: Callable[[Outbound], None]):
        self._receive, self._send = receive, send
        self._common = Sampling()
        self.core: EngineCore | None = None
        self.error: EngineDead | None = None

    def run(self, open_core: Callable[[], EngineCore], on_death: Callable[[EngineDead], None]) -> int:
        """Serve an engine until `Shutdown`; returns an exit code.

        Args:
            open_core: makes the engine.
            on_death: called, in any thread, if another process of the engine has died.
        """
        try:
            core = self.core = open_core()
        except RametError as error:
            self._send(Failed(error.message))
            return 1
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._send(Failed(_TOO_LITTLE))
            return 1
        try:
            core.executor.on_death(on_death)
            self._send(Ready(core.info))
            self._serve(core)
        except EngineDead as error:
            self.error = error
            log.error("%s", error.message)
            return 1
        finally:
            core.close()
        return 0

    def _serve(self, core: EngineCore) -> None:
        idle_ms = None if core.parts.idle_s is None else int(core.parts.idle_s * 1000)
        wait_ms = 0 if core.busy else idle_ms
        while self._take_messages(core, wait_ms):
            steps = core.counters["steps"]
            self._send_events(core.step())
            self._settle(core)
            ran = core.counters["steps"] > steps
            wait_ms = (0 if ran else _NOTHING_TO_RUN_MS) if core.busy else idle_ms

    def _take_messages(self, core: EngineCore, wait_ms: int | None) -> bool:
        """Handle queued messages, after waiting up to `wait_ms` (None: without limit) for one; False at `Shutdown`."""
        message = self._receive(wait_ms)
        due_s = time.monotonic() + _MESSAGES_S
        while message is not None:
            if isinstance(message, Shutdown):
                return False
            if isinstance(message, Sampling):
                self._common = message
            else:
                if isinstance(message, AddRequest):
                    message = self._common.complete(message)
                self._send_events(core.handle(message))
                self._settle(core)
            message = self._receive(0) if time.monotonic() <= due_s else None
        return True

    def _settle(self, core: EngineCore) -> None:
        for reply in core.settle():
            self._send(reply)

    def _send_events(self, events: list[TokenEvent]) -> None:
        if events:
            self._send(StepEvents(events))


def over_sockets(inbox: zmq.Socket, outbox: zmq.Socket) -> EngineLoop:
    """The loop of an engine in a process of its own, behind a PULL and a PUSH socket."""

    def receive(wait_ms: int | None) -> Inbound | None:
        if wait_ms != 0:
            inbox.poll(wait_ms)
        try:
            return inbound_decoder.decode(inbox.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    return EngineLoop(receive, lambda message: outbox.send(encode(message)))


def in_thread(
    inbox: queue.SimpleQueue[Inbound], client: asyncio.AbstractEventLoop, take: Callable[[Outbound], None]
) -> EngineLoop:
    """The loop of an engine in a thread; `client`: the event loop on which `take` gets its messages as they are."""

    def receive(wait_ms: int | None) -> Inbound | None:
        try:
            return inbox.get(timeout=None if wait_ms is None else wait_ms / 1000)
        except queue.Empty:
            return None

    def send(message: Outbound) -> None:
        with suppress(RuntimeError):  # the client's event loop may be closed before the engine has ended
            client.call_soon_threadsafe(take, message)

    return EngineLoop(receive, send)
