"""A rank other than the driver: `python -m runtime.execution.parallel.worker`, started by `Workers`, never by hand.

Reads a `RankBoot` message and then orders from standard input, each after its length. The process ends with the driver.
"""

import logging
import os
import queue
import signal
import struct
import sys
import threading
import time
from pathlib import Path

import msgspec
import torch

from runtime.config import Config
from runtime.errors import RametError
from runtime.execution.building import build_executor
from runtime.execution.device import choose_device
from runtime.execution.parallel.group import RankGroup, rank_device
from runtime.execution.parallel.orders import CopyRows, Order, ReadPages, WritePages, decode_order
from runtime.logs import set_up_logs

log = logging.getLogger("ramet.engine")

LENGTH = struct.Struct("<Q")

# Time that a rank has to end after the driver; it may be waiting in a collective.
_END_SECONDS = 10


class RankBoot(msgspec.Struct):
    """The first message to a rank: configuration (JSON), model directory, rank, and port of the store."""

    config: str
    path: str
    rank: int
    port: int


class Inbox:
    """Messages from standard input. A thread reads them, so the end of the driver is noticed even within a step."""

    def __init__(self) -> None:
        # Not sys.stdin: the thread would hold its lock and block the interpreter's shutdown.
        self._file = open(0, "rb", closefd=False)  # noqa: SIM115
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()

    def boot(self) -> RankBoot:
        data = self._read()
        assert data is not None
        threading.Thread(target=self._fill, daemon=True).start()
        return msgspec.json.decode(data, type=RankBoot)

    def get(self) -> Order | None:
        """Wait for the next order; None: the driver has closed the pipe."""
        return self._orders.get()

    def _fill(self) -> None:
        while (data := self._read()) is not None:
            self._orders.put(decode_order(data))
        self._orders.put(None)
        time.sleep(_END_SECONDS)
        os._exit(1)

    def _read(self) -> bytes | None:
        head = self._file.read(LENGTH.size)
        return self._file.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else None


def main() -> int:
    """Execute orders until the driver closes the pipe; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    inbox = Inbox()
    boot = inbox.boot()
    config = Config.model_validate_json(boot.config)
    set_up_logs(config.server.log_level, config.server.log_format)
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    size = config.model.tensor_parallel
    try:
        device = rank_device(choose_device(config.model), boot.rank, size)
        store = RankGroup.find_store(boot.port, size)
        store.set(f"rank{boot.rank}", "here")
        group = RankGroup(store, boot.rank, size, device)
        executor = build_executor(config, Path(boot.path), group)
    except RametError as error:
        log.error("rank %d: %s", boot.rank, error.message)
        return 1
    while (order := inbox.get()) is not None:
        if isinstance(order, CopyRows):
            executor.pool.copy_rows(order.source_page, order.target_page, order.rows)
        elif isinstance(order, ReadPages):
            group.side_by_side(executor.pool.read_pages(order.pages).view(1, -1))
        elif isinstance(order, WritePages):
            executor.pool.write_pages(order.pages, order.data)
        else:
            executor.run(order)
    group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
