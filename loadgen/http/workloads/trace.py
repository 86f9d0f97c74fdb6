"""Recorded traffic: traces of `--record-trace` and Mooncake's (times, lengths, block hashes), and Azure's."""

import csv
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, NamedTuple

from loadgen.http.prose import Prose
from loadgen.http.session import Message, Session, Turn
from loadgen.http.workloads.base import Source, Workload, need_file

MOONCAKE = 512  # tokens of a block in Mooncake's traces; others say how many


class Row(NamedTuple):
    """One recorded request.

    Attributes:
        at_s: seconds since the first request.
        input_tokens: tokens of the prompt.
        output_tokens: tokens of the answer.
        blocks: hashes of the prompt's blocks.
        block_tokens: tokens of a block.
        tenant: the sender, if the trace names it.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE
    tenant: str = ""


@dataclass(frozen=True)
class Trace(Workload):
    """A recorded trace.

    Attributes:
        trace: JSONL of `--record-trace` or as Mooncake's, or Azure's CSV.
        speed: factor on the recorded speed.
        window_start: seconds into the trace at which the replay begins.
        window: seconds of the trace that are replayed; 0: all.
        shrink: factor on all lengths, blocks included, for models with a short context.
        max_tokens: longer requests (prompt and answer, after shrinking) are left out; 0: none are.
    """

    trace: Path
    speed: float = 1.0
    window_start: float = 0.0
    window: float = 0.0
    shrink: float = 1.0
    max_tokens: int = 0

    TIMED: ClassVar[bool] = True

    def __post_init__(self) -> None:
        need_file(self.trace)
        if not (self.speed > 0 and 0 < self.shrink <= 1):
            raise ValueError("speed must be above 0, and shrink above 0 and at most 1")

    def requests(self, concurrency: int) -> None:
        """None: it ends with its file."""

    def sessions(self, source: Source) -> Iterator[Session]:
        """One session for each request, by time. The same block hash is the same text in every run of a seed."""
        seed = source.rng.random()
        end = self.window_start + (self.window or math.inf)
        for number, row in enumerate(read_trace(self.trace)):
            tokens, output = self._shrunk(row.input_tokens), self._shrunk(row.output_tokens)
            if not self.window_start <= row.at_s < end or 0 < self.max_tokens < tokens + output:
                continue
            parts = self._parts(row, tokens, source.prose, (seed, number))
            at_s = (row.at_s - self.window_start) / self.speed
            yield Session((Turn((Message("user", parts),), output),), group=_group(row), at_s=at_s)

    def _shrunk(self, tokens: int) -> int:
        return max(round(tokens * self.shrink), 1)

    def _parts(self, row: Row, tokens: int, prose: Prose, key: tuple[float, int]) -> tuple[str, ...]:
        if not row.blocks:
            return (prose.reseeded(key, "prompt").text(tokens),)
        size = self._shrunk(row.block_tokens)
        parts = []
        for i, block in enumerate(row.blocks):
            # The last block may be filled in part; its hash is that of the filled part.
            wanted = min(size, tokens - i * size)
            if wanted > 0:
                parts.append(prose.reseeded(key[0], block).text(wanted) + " ")
        return tuple(parts)


def _group(row: Row) -> str:
    return row.tenant or (f"block {row.blocks[0]}" if row.blocks else "")


def read_trace(path: Path) -> list[Row]:
    """The rows of a trace, by time. Raises ValueError, which names the line, for a line in neither format."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        first = lines.readline()
        lines.seek(0)
        rows = list((_mooncake if first.lstrip().startswith("{") else _azure)(path, lines))
    if not rows:
        raise ValueError(f"{path} has no requests")
    rows.sort(key=lambda row: row.at_s)
    begin = rows[0].at_s
    return [row._replace(at_s=row.at_s - begin) for row in rows]


def _mooncake(path: Path, lines: Iterator[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            blocks = tuple(entry.get("hash_ids") or ())
            size, tenant = int(entry.get("block_tokens", MOONCAKE)), str(entry.get("tenant", ""))
            lengths = int(entry["input_length"]), int(entry["output_length"])
            yield Row(entry["timestamp"] / 1000, *lengths, blocks, size, tenant)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number} is no request with times, lengths and hashes: {error!r}") from None


def _azure(path: Path, lines: Iterator[str]) -> Iterator[Row]:
    for number, entry in enumerate(csv.DictReader(lines), 2):
        try:
            yield Row(_seconds(entry["TIMESTAMP"]), int(entry["ContextTokens"]), int(entry["GeneratedTokens"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no request of an Azure trace: {error!r}") from None


def _seconds(text: str) -> float:
    """Seconds since the epoch. Azure's times have seven decimals, one more than Python reads, and no zone: UTC."""
    time = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
