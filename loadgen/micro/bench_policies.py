"""`ramet bench policies`: hits of every eviction policy on recorded and on synthetic traces of block hashes.

It replays hours of a server's cache in seconds, in process, without a server.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from heapq import heappop, heappush
from pathlib import Path

from rich.console import Console
from rich.progress import track

from loadgen.http.outputs import add_files, drawing, write_files
from loadgen.http.tables import make_table
from loadgen.micro.stress import STRESS, Trace, stress_trace
from loadgen.micro.traffic import MOONCAKE, Traffic, read_traffic, reuse_gaps
from radix import POLICIES, PolicyName, RadixTree, make_policy

QUARTERS = 4
BOUND, INFINITE = "offline bound", "infinite"
# Blocks of 512 tokens.
_MOONCAKE_SIZES = (1000, 3000, 5000, 10000, 30000)
# Of a stress trace's distinct blocks.
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)


@dataclass(slots=True)
class Tally:
    """Findings of a replay, by quarter of the trace: blocks asked for and cached, operations needed and saved."""

    blocks: list[int] = field(default_factory=lambda: [0] * QUARTERS)
    hits: list[int] = field(default_factory=lambda: [0] * QUARTERS)
    operations: list[float] = field(default_factory=lambda: [0.0] * QUARTERS)
    saved: list[float] = field(default_factory=lambda: [0.0] * QUARTERS)

    @property
    def hit_ratio(self) -> float:
        return sum(self.hits) / sum(self.blocks)

    @property
    def saved_ratio(self) -> float:
        return sum(self.saved) / sum(self.operations)

    def by_quarter(self) -> list[float]:
        return [hits / max(blocks, 1) for hits, blocks in zip(self.hits, self.blocks, strict=True)]

    def add(self, quarter: int, blocks: int, hits: int) -> None:
        """Count a prompt whose first `hits` blocks were cached."""
        self.blocks[quarter] += blocks
        self.hits[quarter] += hits
        self.operations[quarter] += operations(0, blocks)
        self.saved[quarter] += operations(0, hits)


Figures = dict[str, list[Tally]]  # by policy, for each capacity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces",
        nargs="*",
        help="JSONL of `ramet serve --record-trace`, or as Mooncake's: timestamp (ms) and hash_ids; or of prompts",
    )
    parser.add_argument("--tokenizer", type=Path, help="of a JSONL of prompts (text, prompt or messages): the model's")
    parser.add_argument(
        "--capacities",
        type=int,
        nargs="+",
        help="blocks in the cache; default: shares of the trace's, for Mooncake's 1,000 to 30,000",
    )
    parser.add_argument(
        "--stress",
        nargs="*",
        choices=STRESS,
        help="synthetic traces, too; default: all of them where no trace is given",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic traces")
    add_files(parser, "plot", "json")


def run(arguments: argparse.Namespace) -> int:
    """Replay all traces; print two tables for each that was recorded, and one of all synthetic ones."""
    try:
        recorded = {Path(path).stem: read_traffic(Path(path), arguments.tokenizer) for path in arguments.traces}
    except ValueError as error:
        print(f"ramet bench: {error}", file=sys.stderr)
        return 2
    wanted = arguments.stress if arguments.stress is not None else [] if recorded else STRESS
    synthetic = {name: stress_trace(name, arguments.seed) for name in wanted}
    traces = {name: traffic.trace for name, traffic in recorded.items()} | synthetic
    sizes = {name: capacities_of(trace) for name, trace in traces.items()}
    sizes |= {name: sorted(set(sizes[name])) for name in recorded}
    sizes |= {name: list(_MOONCAKE_SIZES) for name, traffic in recorded.items() if traffic.block_tokens == MOONCAKE}
    if arguments.capacities:
        sizes |= {name: list(arguments.capacities) for name in recorded}
    found = {name: measure(trace, sizes[name], name) for name, trace in traces.items()}
    for name, traffic in recorded.items():
        _print_trace(name, traffic.trace, found[name], sizes[name])
        Console().print(f"{name}: {advice(traffic, found[name], sizes[name])}", highlight=False)
    if synthetic:
        _print_stress({name: found[name] for name in synthetic})
    record = {
        name: {"capacities": sizes[name], **{policy: [asdict(t) for t in row] for policy, row in figures.items()}}
        for name, figures in found.items()
    }
    write_files(arguments, record, plot=partial(_plot, found, sizes))
    return 0


def capacities_of(trace: Trace) -> list[int]:
    """Sizes of interest: shares of the distinct blocks, none too small for the longest prompt."""
    distinct = len({block for _, blocks in trace for block in blocks})
    return [max(int(share * distinct), *(len(blocks) for _, blocks in trace), 1) for share in _SHARES]


def advice(traffic: Traffic, figures: Figures, capacities: Sequence[int]) -> str:
    """Sentences on policy, pool, tiers and hold time, from a replay."""
    ratio = {name: [100 * one.hit_ratio for one in row] for name, row in figures.items()}
    size, most, middle = traffic.block_tokens, ratio[INFINITE][0], len(capacities) // 2
    best = max(POLICIES, key=lambda policy: ratio[policy][middle])
    enough = next((i for i, found in enumerate(ratio[best]) if found >= 0.9 * most), len(capacities) - 1)
    said = [
        f"{most:.1f} % of the prompt tokens were there before, and no cache can find more.",
        f"A pool of {capacities[enough] * size:,} tokens (--pool-tokens) finds {ratio[best][enough]:.1f} % with "
        f"--eviction-policy {best}"
        + (
            f"; one of {capacities[0] * size:,} finds {ratio[best][0]:.1f} %."
            if enough
            else ", and none needs to be larger."
        ),
    ]
    if most - ratio[best][middle] > 2:
        said.append(
            f"With {capacities[middle] * size:,} tokens, tiers (--host-memory, --disk-cache) could find up to "
            f"{most - ratio[best][middle]:.1f} points more."
        )
    if gaps := reuse_gaps(traffic.trace):
        said.append(
            f"Nine of ten uses come within {_duration(gaps[int(0.9 * (len(gaps) - 1))])}: hold times beyond help few."
        )
    return " ".join(said)


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def measure(trace: Trace, capacities: Sequence[int], name: str) -> Figures:
    """Every policy at every size, the bound, and a cache without limits."""
    work = [(policy, capacity) for policy in POLICIES for capacity in capacities]
    found: Figures = {policy: [] for policy in POLICIES}
    for policy, capacity in track(work, description=f"replaying {name}"):
        found[policy].append(replay(trace, policy, capacity))
    found[BOUND] = [offline_bound(trace, capacity) for capacity in capacities]
    found[INFINITE] = [replay(trace, "lru", sum(len(blocks) for _, blocks in trace))] * len(capacities)
    return found


def operations(start: int, end: int) -> float:
    """Of computing these blocks of a prompt: a constant part, and one for attention that grows with the depth."""
    return (end - start) + (end * (end - 1) - start * (start - 1)) / 2 / 64


def replay(trace: Trace, policy: PolicyName, capacity: int) -> Tally:
    """Replay through a cache of `capacity` blocks."""
    now = 0.0
    tree = RadixTree(1, make_policy(policy, capacity), lambda: now)
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
        tree.insert(key, pages, cost=operations(hit, hit + fresh))
        tree.unlock(node)
        free, next_page = free - fresh, (next_page + fresh) % (1 << 30)
        tally.add(number * QUARTERS // len(trace), len(blocks), hit)
    return tally


def offline_bound(trace: Trace, capacity: int) -> Tally:
    """Belady with bypass: evict what is needed last, or do not admit the newcomer. No online policy has more hits.

    Blocks are not bound to their prefixes here, so that operations saved have no such bound.
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


def _print_trace(name: str, trace: Trace, figures: Figures, capacities: Sequence[int]) -> None:
    blocks = sum(len(blocks) for _, blocks in trace)
    columns = ("blocks in the cache", *map(str, capacities))
    whole = make_table(f"{name}: {len(trace)} requests, {blocks} blocks; % of the blocks, of the operations", columns)
    quarters = make_table(f"{name}: hit ratio in % by quarter", columns)
    for policy, row in figures.items():
        whole.add_row(f"{policy}: hits", *(f"{100 * one.hit_ratio:.1f}" for one in row))
        for quarter, ratios in enumerate(zip(*(one.by_quarter() for one in row), strict=True), 1):
            quarters.add_row(f"{policy}, {quarter}", *(f"{100 * ratio:.1f}" for ratio in ratios))
    for policy, row in figures.items():
        if policy != BOUND:
            whole.add_row(f"{policy}: saved", *(f"{100 * one.saved_ratio:.1f}" for one in row))
    Console().print(whole, quarters)


def _print_stress(found: dict[str, Figures]) -> None:
    columns = ("trace, share of its blocks", *(f"{share:.0%}" for share in _SHARES))
    table = make_table("hit ratio in %, and points ahead of lru", columns)
    for name, figures in found.items():
        table.add_row(name, *(f"{100 * one.hit_ratio:.1f}" for one in figures["lru"]), style="bold")
        for policy in (*POLICIES, BOUND):
            if policy != "lru":
                pairs = zip(figures[policy], figures["lru"], strict=True)
                table.add_row(f"  {policy}", *(f"{100 * (one.hit_ratio - lru.hit_ratio):+.2f}" for one, lru in pairs))
    Console().print(table)


def _plot(found: dict[str, Figures], sizes: dict[str, list[int]], path: Path) -> None:
    columns = min(len(found), 4)
    rows = -(-len(found) // columns)
    with drawing(path, (3.6 * columns, 2.9 * rows), rows, columns, squeeze=False) as grid:
        for axes in grid.flat[len(found) :]:
            axes.remove()
        for axes, (name, figures) in zip(grid.flat, found.items(), strict=False):
            for policy, row in figures.items():
                style = {BOUND: "k--", INFINITE: "k:"}.get(policy, "o-")
                axes.plot(sizes[name], [100 * one.hit_ratio for one in row], style, label=policy, markersize=3)
            axes.set(xscale="log", title=name)
            axes.set_ylim(bottom=0)
            axes.xaxis.set_minor_formatter("")
            axes.grid(alpha=0.3)
        grid[0][0].legend(fontsize=7)
        grid[0][0].figure.supxlabel("blocks in the cache")
        grid[0][0].figure.supylabel("hit ratio, %")
