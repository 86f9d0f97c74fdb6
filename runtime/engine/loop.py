"""The engine's loop: messages in, steps, messages out. It runs in a process of its own or in a thread."""

import logging
import time
from collections.abc import Callable

import zmq

from runtime.engine.core import EngineCore
from runtime.errors import EngineDead, RametError
from runtime.protocol import Failed, Outbound, Ready, Shutdown, StepEvents, TokenEvent, encode, inbound_decoder

log = logging.getLogger("ramet.engine")

# Wait for messages if there are requests but no step to run: all requests wait for a grammar or a tier.
_NOTHING_TO_RUN_MS = 5
# Longest time for messages before a step: a stream of requests that are refused at once could delay it for ever.
_MESSAGES_S = 0.02


class EngineLoop:
    """An engine behind two sockets.

    Args:
        inbox: PULL.
        outbox: PUSH.
    """

    def __init__(self, inbox: zmq.Socket, outbox: zmq.Socket):
        self._inbox, self._outbox = inbox, outbox
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
        if wait_ms != 0:
            self._inbox.poll(wait_ms)
        due_s = time.monotonic() + _MESSAGES_S
        while True:
            try:
                message = inbound_decoder.decode(self._inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return True
            if isinstance(message, Shutdown):
                return False
            self._send_events(core.handle(message))
            self._settle(core)
            if time.monotonic() > due_s:
                return True

    def _settle(self, core: EngineCore) -> None:
        for reply in core.settle():
            self._send(reply)

    def _send_events(self, events: list[TokenEvent]) -> None:
        if events:
            self._send(StepEvents(events))

    def _send(self, message: Outbound) -> None:
        self._outbox.send(encode(message))
