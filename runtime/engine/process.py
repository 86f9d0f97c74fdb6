"""The engine process: `python -m runtime.engine.process`, started by `AsyncEngine`, never by hand.

The configuration is one line of JSON on standard input, which then stays open as long as the parent lives: no engine
outlives its server. Messages travel over two ZeroMQ sockets.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import torch
import zmq

from runtime.config import Config
from runtime.engine.core import EngineCore
from runtime.errors import EngineDead, RametError
from runtime.logs import set_up_logs
from runtime.protocol import Failed, Outbound, Ready, Shutdown, StepEvents, encode, inbound_decoder

log = logging.getLogger("ramet.engine")

# Wait of an engine that has requests but nothing to run.
_NOTHING_TO_RUN_MS = 10

# Time for messages before a step is due: those that are refused at once could go on coming for ever.
_MESSAGES_S = 0.02


class Boot(msgspec.Struct):
    """The first line on standard input.

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


def main() -> int:
    """Run the engine until `Shutdown`, or until the parent is gone."""
    # Signals to the process group are for the server, which drains; the engine ends by `Shutdown` or with its parent.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    boot = msgspec.json.decode(sys.stdin.buffer.readline(), type=Boot)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config = Config.model_validate_json(boot.config)
    set_up_logs(config.server.log_level, config.server.log_format)
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((inbox, boot.inbox), (outbox, boot.outbox)):
        socket.set_hwm(0)
        socket.connect(address)
    try:
        core = _start(config, boot)
    except RametError as error:
        outbox.send(encode(Failed(error.message)))
        context.destroy(linger=2000)
        return 1
    outbox.send(encode(Ready(msgspec.to_builtins(core.info))))
    # Nothing else ends an engine that waits for messages; its server then fails every open request.
    core.executor.on_death(lambda _: os._exit(1))
    try:
        _serve(core, inbox, outbox)
    except EngineDead as error:
        log.error("%s", error.message)
        return 1
    finally:
        core.close()
        context.destroy(linger=2000)
    return 0


def _start(config: Config, boot: Boot) -> EngineCore:
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    core = EngineCore(config, Path(boot.path), boot.quotas)
    # What is there now stays: a full collection that walked it would be a pause of a tenth of a second for everybody.
    gc.collect()
    gc.freeze()
    return core


def _serve(core: EngineCore, inbox: zmq.Socket, outbox: zmq.Socket) -> None:
    def out(message: Outbound | None) -> None:
        if message is not None and not (isinstance(message, StepEvents) and not message.events):
            outbox.send(encode(message))

    def settle() -> None:
        for reply in core.take_replies():
            out(reply)
        core.publish()

    idle_ms = -1 if core.idle_s is None else int(core.idle_s * 1000)
    wait_ms = 0 if core.busy else idle_ms
    while True:
        due_s = math.inf
        while time.monotonic() < due_s and inbox.poll(wait_ms):
            message = inbound_decoder.decode(inbox.recv())
            if isinstance(message, Shutdown):
                return
            out(core.handle(message))
            settle()
            wait_ms = 0 if core.busy else idle_ms
            due_s = min(due_s, time.monotonic() + _MESSAGES_S) if core.busy else math.inf
        steps = core.counters["steps"]
        out(StepEvents(core.step()))
        settle()
        runs = core.counters["steps"] > steps or core.loading
        wait_ms = idle_ms if not core.busy else 0 if runs else _NOTHING_TO_RUN_MS


def _end_with_parent() -> None:
    # Not through sys.stdin: its lock, held here, would break the interpreter's shutdown.
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
