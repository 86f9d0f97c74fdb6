"""The engine's process: `python -m runtime.process`, started by `EngineProcess`, never by hand.

The first line of standard input is the configuration as JSON. The end of standard input means that the parent has
ended; then the engine ends as well.
"""

import gc
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
import zmq

from runtime.config import Config
from runtime.engine.core import EngineCore
from runtime.engine.loop import over_sockets
from runtime.logs import set_up_logs
from runtime.opening import open_engine
from runtime.protocol import Boot


def main() -> int:
    """Run the engine until `Shutdown`, or until the parent is gone."""
    # The server handles signals to the process group, and drains. The engine ends by `Shutdown` or with its parent.
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
        # os._exit, since the loop may be waiting for messages. The server then fails every open request.
        return over_sockets(inbox, outbox).run(lambda: _open(config, boot), lambda _: os._exit(1))
    finally:
        context.destroy(linger=2000)


def _open(config: Config, boot: Boot) -> EngineCore:
    core = open_engine(config, Path(boot.path), boot.quotas)
    # Exclude all objects made so far from garbage collection: walking over them would stop all requests for 0.1 s.
    gc.collect()
    gc.freeze()
    return core


def _end_with_parent() -> None:
    # Not through sys.stdin: its lock, held here, would break the interpreter's shutdown.
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
