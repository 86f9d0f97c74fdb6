"""`ramet bench tiers`: time to the first token from each tier below the pool, and throughput with tiers, in process.

The disk's figures are read from the disk: its files leave the page cache first (`posix_fadvise`, DONTNEED).
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

from pydantic import Field, PositiveInt, PrivateAttr

from loadgen.experiments.micro.model_bench import ModelBench
from loadgen.harness import BenchError, Cell, Figure, repeats_of
from loadgen.offline.drive import Drive
from runtime.features.tiers.tiering import Tiering

_BASE, _ALL = "computed", "all tiers"
_TIERS = ("host", "disk", "store")
_FIRST, _EVICTING, _WRITING = "first token", "prefixes that do not fit", "prefixes that are written"
_PREFIXES = 16


class Tiers(ModelBench):
    """KV from the tiers below the pool.

    `first token`: the prefix of a question is computed, or comes from the pool or a tier. `prefixes that do not fit`:
    prompts continue 16 prefixes, of which the pool holds half. `prefixes that are written`: each prefix has four
    requests, so that all prefixes are written to the tiers; none is loaded.
    """

    sections = "work"
    figures = (
        Figure("ttft", "TTFT, ms", factor=1e3, versus="ratio", plotted=True),
        Figure("rate", "tokens/s", ".0f", versus="ratio", plotted=True),
        Figure("p50", "step p50, ms", factor=1e3),
        Figure("p99", "step p99, ms", factor=1e3, versus="ratio"),
        Figure("cpu", "CPU ms a token", ".3f", 1e3, versus="ratio"),
    )

    repeats: int = repeats_of(7)
    prefix: PositiveInt = Field(4096, description="tokens of the prefix")
    question: PositiveInt = Field(128, description="tokens behind the prefix")
    requests: PositiveInt = Field(64, description="throughput: requests in a measurement")
    shared: PositiveInt = Field(448, description="throughput: tokens in a prefix")
    kv_store: str | None = Field(None, description="redis://... or dir:PATH; default: a directory")
    directory: Path | None = Field(None, description="directory on the disk to measure; default: /tmp")

    _drives: dict[str, Drive] = PrivateAttr(default_factory=dict)
    _disk: Path = PrivateAttr()

    def baseline(self) -> tuple[str, str]:
        return "KV", _BASE

    @contextmanager
    def session(self) -> Iterator[None]:
        path = self.path()
        with ExitStack() as stack:
            directory = Path(
                stack.enter_context(tempfile.TemporaryDirectory(dir=self.directory, prefix="ramet-tiers-"))
            )
            self._disk = directory / "disk"
            one: dict[str, dict[str, Any]] = {
                "host": {"host_memory": 4.0},
                "disk": {"disk_cache": self._disk, "disk_space": 20.0},
                "store": {"kv_store": self.kv_store or f"dir:{directory / 'store'}"},
            }
            every = {name: value for options in one.values() for name, value in options.items()}
            every["disk_cache"] = directory / "disk-of-all"
            shared = self.shared + 160
            pools = {_EVICTING: _PREFIXES * shared // 2, _WRITING: self.requests * shared // 2 + 4096}
            pool = 4 * (self.prefix + self.question) + 1024
            wanted = {name: {"pool_tokens": pool, **options} for name, options in one.items()}
            for work, tokens in pools.items():
                wanted |= {
                    f"{work} {_BASE}": {"pool_tokens": tokens},
                    f"{work} {_ALL}": {"pool_tokens": tokens, **every},
                }
            for name, options in wanted.items():
                # New texts in each run, because a store may still have those of an earlier run.
                self._drives[name] = drive = Drive(path, random.randrange(1 << 32), **self.options(**options))
                stack.callback(drive.close)
            yield

    def cells(self) -> Iterator[Cell]:
        for source in (_BASE, "pool", *_TIERS):
            yield {"work": _FIRST, "KV": source}
        for work in (_EVICTING, _WRITING):
            for source in (_BASE, _ALL):
                yield {"work": work, "KV": source}

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, float]:
        work, source = cell["work"], cell["KV"]
        if work == _FIRST:
            drive = self._drives[source if source in _TIERS else "host"]
            return {"ttft": self._first_token(drive, source)}
        drive = self._drives[f"{work} {source}"]
        return self._evicting(drive) if work == _EVICTING else self._writing(drive)

    def _first_token(self, drive: Drive, source: str) -> float:
        prefix = drive.text(self.prefix)
        seconds = self._ask(drive, prefix)
        if source != _BASE:
            before = _loaded(drive, source)
            if source != "pool":
                _evict(drive)
            if source == "disk":
                _drop_page_cache(self._disk)
            seconds = self._ask(drive, prefix)
            if source != "pool" and _loaded(drive, source) - before < 0.9 * len(prefix):
                raise BenchError(f"the prefix did not come from {source}: this machine computes it sooner")
        drive.end()
        return seconds

    def _ask(self, drive: Drive, prefix: array[int]) -> float:
        drive.add(prefix + drive.text(self.question), 1)
        return drive.first_tokens()

    def _evicting(self, drive: Drive) -> dict[str, float]:
        """Up to four requests decode, while new prompts continue one of 16 prefixes."""
        prefixes = [drive.text(self.shared) for _ in range(_PREFIXES)]
        times: list[float] = []
        started = time.perf_counter()
        for number in range(self.requests):
            drive.add(prefixes[7 * number % _PREFIXES] + drive.text(64), 16)
            while len(drive.core.requests) >= 4:
                times.append(drive.step())
        while drive.core.busy:
            times.append(drive.step())
        seconds = time.perf_counter() - started
        drive.end()
        cuts = quantiles(times, n=100)
        return {"p50": cuts[49], "p99": cuts[98], "rate": self.requests * (self.shared + 64 + 16) / seconds}

    def _writing(self, drive: Drive) -> dict[str, float]:
        """Four requests for each new prefix. CPU time includes the writes after the last request."""
        started, cpu, tokens = time.perf_counter(), time.process_time(), 0
        for _ in range(max(self.requests // 4, 1)):
            prefix = drive.text(self.shared)
            for _ in range(4):
                drive.add(prefix + drive.text(96), 32)
                tokens += self.shared + 96 + 32
            drive.finish()
        seconds = time.perf_counter() - started
        _drain(drive)
        cpu = time.process_time() - cpu
        drive.end()
        return {"rate": tokens / seconds, "cpu": cpu / tokens}


def _drain(drive: Drive) -> None:
    """Wait until all blocks are written, if there are tiers."""
    for part in drive.core.parts:
        if isinstance(part, Tiering):
            part.tiers.worker.drain()


def _evict(drive: Drive) -> None:
    """Evict all unused blocks, and wait until they are written."""
    cache = drive.core.cache
    cache.allocator.release(cache.tree.evict(cache.tree.num_pages))
    _drain(drive)


def _loaded(drive: Drive, tier: str) -> int:
    return drive.core.part(Tiering).tiers.loaded_tokens.get(tier, 0)


def _drop_page_cache(directory: Path) -> None:
    for path in directory.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
