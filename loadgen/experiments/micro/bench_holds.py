"""`ramet bench holds`: what hold times do to those who ask for them, and to others."""

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, NonNegativeFloat, PrivateAttr

from loadgen.harness import Bench, BenchError, Cell, Figure, repeats_of, warmup_of
from loadgen.offline.bench_policies import capacities_of, replay
from loadgen.offline.traffic import Trace, read_traffic
from radix import POLICIES

_SYNTHETIC = ("bursts", "agents", "few agents")
_HOUR_S = 3600.0
# Blocks in the cache, as an index of `capacities_of`.
_SIZES = {"small": 1, "large": 3}


class Mixed(NamedTuple):
    """A trace, and of each request whether it holds its prompt."""

    trace: Trace
    holds: list[bool]


class Holds(Bench):
    """Hits by hold time: of requests that hold their prompts, and of the others beside them.

    An hour of synthetic traffic. Most requests ask about documents, some of them popular; these hold nothing.
    `bursts`: the other prompts are asked two to six times, with pauses of 2 to 20 s, and never again. `agents`: the
    others are sessions of 5 to 20 turns, with pauses of 10 to 90 s for tools and people. `few agents`: only a tenth of
    these sessions hold. In recorded traces all requests hold.
    """

    sections = "traffic"
    figures = (
        Figure("holding", "hits of those who hold, %", ".1f", 100, versus="difference", plotted=True),
        Figure("others", "of others", ".1f", 100, versus="difference"),
        Figure("hits", "of all", ".1f", 100, versus="difference"),
    )

    repeats: int = repeats_of(3)
    warmup: int = warmup_of(0)
    hold_times: tuple[NonNegativeFloat, ...] = Field((0.0, 30.0, 120.0), description="in seconds")
    traces: tuple[Path, ...] = Field((), description="JSONL files as for `policies`, in place of synthetic traffic")

    _recorded: dict[str, Mixed] = PrivateAttr(default_factory=dict)

    def baseline(self) -> tuple[str, float]:
        return "hold time, s", self.hold_times[0]

    @contextmanager
    def session(self) -> Iterator[None]:
        try:
            found = {path.stem: read_traffic(path).trace for path in self.traces}
        except (OSError, ValueError) as error:
            raise BenchError(str(error)) from None
        self._recorded = {name: Mixed(trace, [True] * len(trace)) for name, trace in found.items()}
        yield

    def cells(self) -> Iterator[Cell]:
        for name in self._recorded or _SYNTHETIC:
            for size in _SIZES:
                for policy in POLICIES:
                    for hold_s in self.hold_times:
                        yield {"traffic": name, "cache": size, "policy": policy, "hold time, s": hold_s}

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, float]:
        name = cell["traffic"]
        trace, holds = self._recorded.get(name) or mixed(name, draw)
        capacities = capacities_of(trace)
        capacity = capacities[min(_SIZES[cell["cache"]], len(capacities) - 1)]
        hold_s = [cell["hold time, s"] * holding for holding in holds]
        found = replay(trace, cell["policy"], capacity, hold_s).found
        asked: dict[bool, int] = {True: 0, False: 0}
        hits = dict(asked)
        for (_, blocks), holding, hit in zip(trace, holds, found, strict=True):
            asked[holding] += len(blocks)
            hits[holding] += hit
        return {
            "holding": hits[True] / asked[True],
            "others": hits[False] / max(asked[False], 1),
            "hits": sum(hits.values()) / sum(asked.values()),
        }


def mixed(name: str, draw: random.Random) -> Mixed:
    """An hour of one of the kinds of synthetic traffic."""
    ids, is_burst = count(), name == "bursts"

    def new(least: int, most: int) -> list[int]:
        return [next(ids) for _ in range(draw.randint(least, most))]

    documents, systems = [new(5, 40) for _ in range(400)], [new(10, 20) for _ in range(3)]
    popularity = [1 / (i + 1) for i in range(len(documents))]
    # When a request is due, a number that breaks ties, the prompt (None: about a document), turns left, if it holds.
    due: list[tuple[float, int, list[int] | None, int, bool]] = [(0.0, next(ids), None, 0, False)]
    start_s = 0.0
    while (start_s := start_s + draw.expovariate(1 / 8)) < _HOUR_S:
        first = new(10, 30) if is_burst else [*draw.choice(systems), *new(1, 12)]
        turns, holding = draw.randint(2, 6) if is_burst else draw.randint(5, 20), draw.random() < 0.1
        heappush(due, (start_s, next(ids), first, turns, holding or name != "few agents"))
    trace: Trace = []
    holds: list[bool] = []
    while due[0][0] < _HOUR_S:
        at_s, _, prompt, left, holding = heappop(due)
        asked = draw.choices(documents, popularity)[0] if prompt is None else prompt
        trace.append((at_s, array("i", [*asked, next(ids)])))
        holds.append(holding)
        if prompt is None:
            heappush(due, (at_s + draw.expovariate(1.5), next(ids), None, 0, False))
        elif left > 1:
            pause_s = draw.uniform(2, 20) if is_burst else draw.uniform(10, 90)
            heappush(due, (at_s + pause_s, next(ids), prompt if is_burst else prompt + new(1, 4), left - 1, holding))
    return Mixed(trace, holds)
