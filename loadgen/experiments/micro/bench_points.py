"""`ramet bench points`: hits of models with recurrent layers, by the places at which states are kept."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, PositiveInt, PrivateAttr

from loadgen.experiments.micro.points import PAGE, PLACEMENTS, Exchange, blocks_as_tokens, replay, sessions
from loadgen.harness import Bench, BenchError, Cell, Figure, repeats_of, warmup_of
from loadgen.offline.traffic import read_traffic

_SYNTHETIC = ("agents", "chats", "reasoning")
_EVERY = "every token"
# Pools, as shares of the pages of all KV.
_POOLS = {"5 %": 0.05, "20 %": 0.2, "all": 1.0}


class Points(Bench):
    """Replays of sessions on the cache, with the strategies of the engine, but without a model.

    `every token`: a state behind every token, which takes no memory; no cache can find more. The others have a pool
    larger by the factor `--room`, in which states take memory. `ramet`: the engine's own places. `528 tokens`: a state
    behind every 528 tokens of a prompt. `one a request`: a state where the output ends.
    """

    sections = "traffic"
    figures = (
        Figure("hits", "hits, % of the prompt tokens", ".1f", 100, versus="ratio", plotted=True),
        Figure("memory", "pages by pages of KV", ".2f"),
    )

    repeats: int = repeats_of(2)
    warmup: int = warmup_of(0)
    traces: tuple[Path, ...] = Field((), description="JSONL files with block hashes, in place of synthetic sessions")
    number: PositiveInt = Field(100, description="sessions, or a trace's first requests")
    cost: PositiveInt = Field(1600, description="tokens whose KV takes as much memory as a state (Qwen3.5-9B: 1600)")
    room: float = Field(1.25, ge=1, description="size of the pool by that of a cache whose states take no memory")

    _recorded: dict[str, list[Exchange]] = PrivateAttr(default_factory=dict)

    def baseline(self) -> tuple[str, str]:
        return "a state at", _EVERY

    @contextmanager
    def session(self) -> Iterator[None]:
        try:
            for path in self.traces:
                traffic = read_traffic(path)
                self._recorded[path.stem] = blocks_as_tokens(traffic.trace[: self.number], traffic.block_tokens)
        except (OSError, ValueError) as error:
            raise BenchError(str(error)) from None
        yield

    def cells(self) -> Iterator[Cell]:
        for name in self._recorded or _SYNTHETIC:
            for pool in _POOLS:
                for placement in PLACEMENTS:
                    yield {"traffic": name, "pool": pool, "a state at": placement}

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, float]:
        asks = self._recorded.get(cell["traffic"]) or sessions(cell["traffic"], self.number, draw)
        distinct = replay(asks, _EVERY, sum(len(ask.prompt) + len(ask.output) for ask in asks) // PAGE, 1).kv_pages
        longest = max(len(ask.prompt) + len(ask.output) for ask in asks) // PAGE + 2
        pages = max(int(_POOLS[cell["pool"]] * distinct), longest)
        room = 1.0 if cell["a state at"] == _EVERY else self.room
        found = replay(asks, cell["a state at"], int(room * pages), self.cost)
        return {
            "hits": found.cached / found.asked,
            "memory": (found.kv_pages + found.point_pages) / max(found.kv_pages, 1),
        }
