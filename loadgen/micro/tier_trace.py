"""A trace of block ids, replayed on an engine with tiers and a small random model."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadgen.http.local_server import SMALL_MODEL
from loadgen.micro.drive import Drive

# Tokens that stand for a block of the trace: as many as a block of the tiers has with this model.
BLOCK_TOKENS = 64
_CONFIG = {**SMALL_MODEL, "vocab_size": 8192, "max_position_embeddings": 1 << 17}
_BYTES_PER_TOKEN = 2 * 2 * 32 * 4


class Replay:
    """Requests one after another; a request longer than the pool is cut.

    Attributes:
        tokens, cached: of each prompt, and how many of them came from the pool or a tier.
    """

    def __init__(self, pool_blocks: int, floors: str, directory: Path):
        """`floors`: `pool`, with host memory where it is named, with host memory and a disk where that is named."""
        model = directory / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(_CONFIG))
        self._pool_blocks = pool_blocks
        self._options: dict[str, Any] = {
            "random_weights": True, "dtype": "float32", "pool_tokens": pool_blocks * BLOCK_TOKENS, "step_tokens": 4096
        }  # fmt: skip
        if "disk" in floors or "host" in floors:
            self._options["host_memory"] = 4 * pool_blocks * BLOCK_TOKENS * _BYTES_PER_TOKEN / (1 << 30)
        if "disk" in floors:
            self._options |= {"disk_cache": directory / "disk", "disk_space": 50.0}
        self._model = model
        self.tokens: list[int] = []
        self.cached: list[int] = []
        self._drive = self._open()

    def _open(self) -> Drive:
        drive = Drive(self._model, **self._options)
        if drive.core.tiers is not None:
            # A model of any use computes far more slowly than a tier loads; this one does not.
            drive.core.tiers.computed = lambda num_rows, seconds: None  # type: ignore[method-assign]
        return drive

    def restart(self) -> None:
        """Close the engine, and open another one."""
        self._drive.close()
        self._drive = self._open()

    def ask(self, blocks: Sequence[int]) -> None:
        """Compute a prompt; between requests, writing catches up, as it does in the seconds between a trace's."""
        fit = list(blocks)[: self._pool_blocks // 2 - 1]
        prompt = array("i", (1 + block_token(block, i) for block in fit for i in range(BLOCK_TOKENS)))
        before = self._drive.core.counters["cached_tokens"]
        self._drive.add(prompt, 1)
        while self._drive.core.busy:
            self._drive.core.step()
        if self._drive.core.tiers is not None:
            self._drive.core.tiers.worker.drain()
        self.tokens.append(len(blocks) * BLOCK_TOKENS)
        self.cached.append(self._drive.core.counters["cached_tokens"] - before)

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *exc: object) -> None:
        self._drive.close()


def block_token(block: int, place: int) -> int:
    """A token below 8,191 such that different blocks differ within their first three."""
    return (block, block >> 12, block >> 24)[place % 3] % 4096 + 4095 * (place % 3 == 1)


def infinite(trace: Sequence[Sequence[int]]) -> float:
    """Share of the blocks that a cache of any size would have."""
    seen: set[int] = set()
    hits = total = 0
    for blocks in trace:
        total += len(blocks)
        hits += next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
    return hits / total
