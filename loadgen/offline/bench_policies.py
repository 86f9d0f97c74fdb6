"""`ramet bench policies`: hits of every eviction policy on recorded and on synthetic traces of block hashes.

Hours of a server's cache are replayed in seconds, in process, without a server.
"""

import random
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

from pydantic import Field, PositiveInt, PrivateAttr

from loadgen.harness import Bench, BenchError, Cell, Figure, Results, repeats_of, warmup_of
from loadgen.http.workloads.trace import MOONCAKE
from loadgen.offline.stress import STRESS, stress_trace
from loadgen.offline.traffic import Trace, Traffic, read_traffic, reuse_gaps
from radix import POLICIES, Holds, PolicyName, RadixTree, make_policy

QUARTERS = 4
BOUND, INFINITE, ENDS_KNOWN = "offline bound", "infinite", "foresight, ends known"
# Blocks of 512 tokens.
_MOONCAKE_SIZES = (1000, 3000, 5000, 10000, 30000)
# Sizes of the cache, as shares of a trace's distinct blocks.
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)


class Policies(Bench):
    """Hits of eviction policies on traces of block hashes."""

    sections = "trace"
    figures = (
        Figure("hits", "hits, % of the blocks", ".1f", 100, versus="difference", plotted=True),
        Figure("saved", "saved, % of the operations", ".1f", 100),
        *(Figure(f"quarter {n}", f"hits in quarter {n}", ".1f", 100) for n in range(1, QUARTERS + 1)),
    )

    repeats: int = repeats_of(1)
    warmup: int = warmup_of(0)
    traces: tuple[Path, ...] = Field(
        (), description="JSONL files of `ramet serve --record-trace`, in Mooncake's format, or of prompts"
    )
    tokenizer: Path | None = Field(
        None, description="the model's, for a JSONL file of prompts (text, prompt or messages)"
    )
    capacities: tuple[PositiveInt, ...] = Field(
        (), description="blocks in the cache; default: shares of the trace's, and for Mooncake's 1,000 to 30,000"
    )
    stress: tuple[str, ...] | None = Field(
        None, description=f"synthetic traces: {', '.join(STRESS)} (default: all of them if no trace is given)"
    )

    _traffic: dict[str, Traffic] = PrivateAttr(default_factory=dict)

    def baseline(self) -> tuple[str, str]:
        return "policy", "lru"

    @contextmanager
    def session(self) -> Iterator[None]:
        try:
            self._traffic = {path.stem: read_traffic(path, self.tokenizer) for path in self.traces}
        except (OSError, ValueError) as error:
            raise BenchError(str(error)) from None
        names = self.stress if self.stress is not None else () if self.traces else STRESS
        if unknown := set(names) - set(STRESS):
            raise BenchError(f"--stress: {min(unknown)} is none of {', '.join(STRESS)}")
        self._traffic |= {name: Traffic(stress_trace(name, self.seed or 0), 0) for name in names}
        yield

    def cells(self) -> Iterator[Cell]:
        for name, traffic in self._traffic.items():
            for policy in (*POLICIES, ENDS_KNOWN, BOUND, INFINITE):
                for blocks in self._capacities(traffic):
                    yield {"trace": name, "policy": policy, "blocks in the cache": blocks}

    def _capacities(self, traffic: Traffic) -> Sequence[int]:
        if self.capacities:
            return self.capacities
        return _MOONCAKE_SIZES if traffic.block_tokens == MOONCAKE else capacities_of(traffic.trace)

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, float]:
        trace, policy, blocks = self._traffic[cell["trace"]].trace, cell["policy"], cell["blocks in the cache"]
        if policy == BOUND:
            found = offline_bound(trace, blocks)
        elif policy == INFINITE:
            found = replay(trace, "lru", sum(len(blocks) for _, blocks in trace))
        elif policy == ENDS_KNOWN:
            found = replay(trace, "foresight", blocks, ends=last_prompts(trace))
        else:
            found = replay(trace, policy, blocks)
        quarters = {f"quarter {number}": ratio for number, ratio in enumerate(found.by_quarter(), 1)}
        return {"hits": found.hit_ratio, "saved": found.saved_ratio, **quarters}

    def details(self, results: Results) -> Iterable[str]:
        for name, traffic in self._traffic.items():
            if traffic.block_tokens:
                hits: dict[str, dict[int, float]] = {}
                for cell in results.cells.values():
                    if cell["trace"] == name:
                        found = next(iter(results.of(cell).values()))
                        hits.setdefault(cell["policy"], {})[cell["blocks in the cache"]] = 100 * found["hits"]
                yield f"{name}: {advice(traffic, hits)}"


def capacities_of(trace: Trace) -> list[int]:
    """Cache sizes to measure: shares of the distinct blocks, but large enough for the longest prompt."""
    distinct = len({block for _, blocks in trace for block in blocks})
    longest = max(len(blocks) for _, blocks in trace)
    return sorted({max(int(share * distinct), longest, 1) for share in _SHARES})


def advice(traffic: Traffic, hits: dict[str, dict[int, float]]) -> str:
    """Sentences on policy, pool, tiers and hold time. `hits`: percent by policy and capacity."""
    capacities, size = list(hits["lru"]), traffic.block_tokens
    least, middle = capacities[0], capacities[len(capacities) // 2]
    most = hits[INFINITE][least]
    best = max(POLICIES, key=lambda policy: hits[policy][middle])
    enough = next((blocks for blocks in capacities if hits[best][blocks] >= 0.9 * most), capacities[-1])
    said = [
        f"{most:.1f} % of the prompt tokens were in whole blocks of {size} tokens of earlier prompts, as the trace has "
        "them. A server also finds parts of blocks, and what its own answers left.",
        f"A pool of {enough * size:,} tokens (--pool-tokens) finds {hits[best][enough]:.1f} % with "
        f"--eviction-policy {best}; one of {least * size:,} finds {hits[best][least]:.1f} %.",
    ]
    if most - hits[best][middle] > 2:
        said.append(
            f"With {middle * size:,} tokens, tiers (--host-memory, --disk-cache) could find up to "
            f"{most - hits[best][middle]:.1f} points more."
        )
    if gaps := reuse_gaps(traffic.trace):
        longest = _duration(gaps[int(0.9 * (len(gaps) - 1))])
        said.append(f"Nine of ten uses come within {longest}: longer hold times help few.")
    return " ".join(said)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


@dataclass(slots=True)
class Tally:
    """Counts of a replay: blocks and cached blocks by quarter of the trace, operations needed and saved.

    Attributes:
        found: cached blocks of each request.
    """

    found: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=lambda: [0] * QUARTERS)
    hits: list[int] = field(default_factory=lambda: [0] * QUARTERS)
    operations: float = 0.0
    saved: float = 0.0

    @property
    def hit_ratio(self) -> float:
        return sum(self.hits) / sum(self.blocks)

    @property
    def saved_ratio(self) -> float:
        return self.saved / self.operations

    def by_quarter(self) -> list[float]:
        return [hits / max(blocks, 1) for hits, blocks in zip(self.hits, self.blocks, strict=True)]

    def add(self, quarter: int, blocks: int, hits: int) -> None:
        """Count a prompt whose first `hits` blocks were cached."""
        self.found.append(hits)
        self.blocks[quarter] += blocks
        self.hits[quarter] += hits
        self.operations += operations(0, blocks)
        self.saved += operations(0, hits)


def operations(start: int, end: int) -> float:
    """The cost of computing these blocks of a prompt: a constant part, and attention, which grows with the depth."""
    return (end - start) + (end * (end - 1) - start * (start - 1)) / 2 / 64


def last_prompts(trace: Trace) -> set[int]:
    """Numbers of the requests whose prompt no later one continues; the last block is not full, and does not count."""
    later, found = set[int](), set[int]()
    for number, (_, blocks) in reversed(list(enumerate(trace))):
        if blocks[-2:][0] not in later:
            found.add(number)
        later.update(blocks)
    return found


def replay(
    trace: Trace, policy: PolicyName, capacity: int, hold_s: Sequence[float] = (), ends: Collection[int] = ()
) -> Tally:
    """Replay through a cache of `capacity` blocks, half of which may be held.

    Args:
        trace: the requests.
        policy: the eviction policy.
        capacity: blocks in the cache.
        hold_s: hold time of each request; default: nothing is held.
        ends: numbers of the requests whose prompts are evicted before all others.
    """
    now = 0.0
    tree = RadixTree(1, make_policy(policy, capacity), lambda: now)
    holds = Holds(tree, capacity // 2) if hold_s else None
    free, next_page, tally = capacity, 0, Tally()
    for number, (now, blocks) in enumerate(trace):  # noqa: B007 - the tree's clock reads it
        key = blocks.tobytes()
        match = tree.match(key)
        node = tree.lock_match(match)
        tree.use(node)
        hit = len(match.pages)
        fresh = min(len(blocks) - hit, capacity - tree.num_locked_pages)
        if fresh > free:
            free += len(tree.evict(fresh - free))
        pages = match.pages + array("i", range(next_page, next_page + fresh))
        used, _ = tree.insert(key, pages, cost=operations(hit, hit + fresh))
        if holds is not None and hold_s[number]:
            holds.hold(used, hold_s[number])
        tree.unlock(node)
        if used is not None and number in ends:
            tree.spares.add(used)
        free, next_page = free - fresh, (next_page + fresh) % (1 << 30)
        tally.add(number * QUARTERS // len(trace), len(blocks), hit)
    return tally


def offline_bound(trace: Trace, capacity: int) -> Tally:
    """Belady with bypass: evict what is needed last, or do not admit the newcomer. No online policy has more hits.

    Here a block does not need its prefix in the cache, so this is no bound on saved operations.
    """
    following = _next_uses([block for _, blocks in trace for block in blocks])
    cached: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    tally = Tally()
    for number, (_, blocks) in enumerate(trace):
        hits = 0
        for block in blocks:
            hits += block in cached
            cached[block] = use = next(following)
            heappush(farthest, (-use, block))
            while len(cached) > capacity:
                use, victim = heappop(farthest)
                if cached.get(victim) == -use:
                    del cached[victim]
        tally.add(number * QUARTERS // len(trace), len(blocks), hits)
    return tally


def _next_uses(accesses: Sequence[int]) -> Iterator[int]:
    following, seen = [0] * len(accesses), dict[int, int]()
    for i in range(len(accesses) - 1, -1, -1):
        following[i] = seen.get(accesses[i], 1 << 60)
        seen[accesses[i]] = i
    return iter(following)
