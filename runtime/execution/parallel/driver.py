"""The driver of a tensor parallel model: its first rank, which sends orders to the other ranks."""

import contextlib
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from runtime.batch import ForwardBatch
from runtime.config import Config
from runtime.errors import EngineDead, ModelError
from runtime.execution.building import build_executor
from runtime.execution.device import choose_device
from runtime.execution.executor import Executor
from runtime.execution.parallel.group import RankGroup, rank_device
from runtime.execution.parallel.orders import CopyRows, Order, ReadPages, WritePages, encode_order
from runtime.execution.parallel.worker import LENGTH, RankBoot
from runtime.models.implementation import own_spec
from runtime.models.shards import split_spec

log = logging.getLogger("ramet.engine")

_STOP_SECONDS = 10
# Time to wait for the exit code of a rank after a collective with it has failed.
_REAP_SECONDS = 2


class Workers:
    """The processes of the other ranks. They end when this process ends, because it closes their standard input.

    Attributes:
        processes: the processes of ranks 1 and up.
        on_death: called on a separate thread if a process ends before `close`.
    """

    def __init__(self, config: Config, path: Path, size: int, port: int):
        """Start ranks 1 to `size - 1`; `port`: of the store through which all ranks connect."""
        self.processes = [
            subprocess.Popen([sys.executable, "-P", "-m", "runtime.execution.parallel.worker"], stdin=subprocess.PIPE)
            for _ in range(1, size)
        ]
        self.on_death: Callable[[EngineDead], None] | None = None
        self.closing = False
        self._lock = threading.Lock()
        for rank, process in enumerate(self.processes, start=1):
            boot = RankBoot(config.model_dump_json(), str(path), rank, port)
            self._write(process, msgspec.json.encode(boot))
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        self._finalizer = weakref.finalize(self, _hang_up, self.processes)

    def meet(self, store: dist.TCPStore) -> None:
        """Wait until all ranks are ready to join the group. Raises ModelError if a rank ends before."""
        ranks = [f"rank{rank}" for rank in range(1, len(self.processes) + 1)]
        while not store.check(ranks):
            if any(process.poll() is not None for process in self.processes):
                raise ModelError(f"{self.explain().message} before the model was loaded; its log says why")
            time.sleep(0.02)

    def send(self, order: Order) -> None:
        """Send an order to all ranks. Raises EngineDead if a rank has ended."""
        data = encode_order(order)
        with self._lock:
            for process in self.processes:
                self._write(process, data)

    def scatter(self, pages: Sequence[int], theirs: Sequence[np.ndarray]) -> None:
        """Fill pages of the other ranks' pools; `theirs`: uint8 [2, layers, pages, bytes] for each of these ranks."""
        with self._lock:
            for process, data in zip(self.processes, theirs, strict=True):
                self._write(process, encode_order(WritePages(list(pages), np.ascontiguousarray(data))))

    def _write(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(LENGTH.pack(len(data)) + data)
            process.stdin.flush()
        except OSError:
            raise self.explain() from None

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self.closing:
            error = EngineDead(f"rank {rank} of the model ended with code {code}")
            log.error("%s: the engine cannot go on", error.message)
            if self.on_death is not None:
                self.on_death(error)

    def explain(self) -> EngineDead:
        """An error that explains why a step failed; it names the rank that has ended, if any."""
        deadline = time.monotonic() + _REAP_SECONDS
        while time.monotonic() < deadline:
            for rank, process in enumerate(self.processes, start=1):
                if (code := process.poll()) is not None:
                    return EngineDead(f"rank {rank} of the model ended with code {code}")
            time.sleep(0.02)
        return EngineDead("the ranks of the model no longer compute together")

    def hang_up(self) -> None:
        """Close the pipes to the ranks, which end after the orders that they have received."""
        self.closing = True
        self._finalizer()

    def close(self) -> None:
        """`hang_up`, and wait for the processes to end; kills those that take too long."""
        self.hang_up()
        for process in self.processes:
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _hang_up(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()


class ParallelExecutor(Executor):
    """An executor that is the first rank and runs every step on all ranks. A failed step ends the engine."""

    def __init__(self, mine: Executor, workers: Workers, group: RankGroup):
        """`mine`: this rank's executor."""
        super().__init__(**vars(mine))
        self.workers, self.group = workers, group
        self.pool.others, self.pool.ranks = self, group.size

    def on_death(self, call: Callable[[EngineDead], None]) -> None:
        def end(error: EngineDead) -> None:
            self.group.abort()
            call(error)

        self.workers.on_death = end

    def copy_rows(self, source_page: int, target_page: int, rows: int) -> None:
        self.workers.send(CopyRows(source_page, target_page, rows))

    def gather(self, pages: Sequence[int], mine: torch.Tensor) -> torch.Tensor:
        """See `OtherPools`. Only call this between two steps."""
        self.workers.send(ReadPages(list(pages)))
        return self.group.side_by_side(mine.view(1, -1)).view(-1, *mine.shape[1:])

    def scatter(self, pages: Sequence[int], theirs: Sequence[np.ndarray]) -> None:
        self.workers.scatter(pages, theirs)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """See `Executor.run`. Raises EngineDead if a rank fails."""
        self.workers.send(batch)
        try:
            return super().run(batch)
        except Exception as error:
            log.exception("a step failed on the first rank")
            raise self.workers.explain() from error

    def close(self) -> None:
        self.workers.hang_up()
        self.group.close()
        self.workers.close()


def open_ranks(config: Config, path: Path) -> ParallelExecutor:
    """Load the model directory `path` on several ranks. Raises ModelError."""
    size = config.model.tensor_parallel
    if (spec := own_spec(config.model, path)) is None:
        raise ModelError(f"--tensor-parallel is {size}, which is not served with transformers' code")
    split_spec(spec, size)
    device = rank_device(choose_device(config.model), 0, size)
    store = RankGroup.open_store(size)
    workers = Workers(config, path, size, store.port)
    try:
        workers.meet(store)
        group = RankGroup(store, 0, size, device)
        return ParallelExecutor(build_executor(config, path, group), workers, group)
    except BaseException as error:
        workers.close()
        RankGroup.abandon()
        if isinstance(error, RuntimeError):
            raise ModelError(f"the model could not be loaded by all ranks ({error}): their log says why") from error
        raise
