"""`ramet bench policies`: hit ratio of every eviction policy on a recorded trace of prefix-chained block hashes.

It replays hours of a server's cache in seconds, in process, without a server.
"""

from __future__ import annotations

import argparse
import json
import math
from array import array
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from radix import POLICIES, PolicyName, RadixTree, make_policy

Trace = list[tuple[float, array]]  # seconds since the start and int32 block ids, for every request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    parser.add_argument("trace", help="JSONL whose lines have timestamp (ms) and hash_ids, as Mooncake's have")
    parser.add_argument(
        "--capacities", type=int, nargs="+", default=[1000, 3000, 5000, 10000, 30000], help="blocks in the cache"
    )
    parser.add_argument(
        "--parts", type=int, default=1, help="also cut the trace into that many parts, each replayed alone"
    )
    parser.add_argument("--plot", metavar="FILE", help="write the plot as PNG or SVG")
    parser.add_argument("--json", metavar="FILE", help="write the figures")


def run(arguments: argparse.Namespace) -> int:
    """Replay and print a table for the whole trace, and one for each of its parts."""
    trace = read_trace(Path(arguments.trace))
    pieces = {"whole": trace}
    if arguments.parts > 1:
        size = math.ceil(len(trace) / arguments.parts)
        pieces |= {f"part {i + 1}": trace[i * size : (i + 1) * size] for i in range(arguments.parts)}
    figures: dict[str, dict[str, list[float]]] = {}
    for name, piece in pieces.items():
        figures[name] = _measure(piece, arguments.capacities, name)
        _print(name, piece, figures[name], arguments.capacities)
    if arguments.plot:
        _plot(figures["whole"], arguments.capacities, arguments.plot)
    if arguments.json:
        record = {"trace": Path(arguments.trace).name, "capacities": arguments.capacities, "hit_ratio": figures}
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


def read_trace(path: Path) -> Trace:
    """Time and block ids of every request, in the order of arrival. Ids are made small and dense."""
    numbers: dict[int, int] = {}
    trace = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        blocks = array("i", [numbers.setdefault(block, len(numbers)) for block in record["hash_ids"]])
        trace.append((record["timestamp"] / 1000, blocks))
    return trace


def _measure(trace: Trace, capacities: Sequence[int], name: str) -> dict[str, list[float]]:
    work = [(policy, capacity) for policy in POLICIES for capacity in capacities]
    found: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for policy, capacity in track(work, description=f"replaying {name}"):
        found[policy].append(replay(trace, policy, capacity))
    found["offline bound"] = [offline_bound(trace, capacity) for capacity in capacities]
    unlimited = replay(trace, "lru", sum(len(blocks) for _, blocks in trace))
    found["infinite"] = [unlimited] * len(capacities)
    return found


def replay(trace: Trace, policy: PolicyName, capacity: int) -> float:
    """Share of the requested blocks that a cache of `capacity` blocks had."""
    now = 0.0
    tree = RadixTree(1, make_policy(policy, capacity), lambda: now)
    free, hits, total, next_page = capacity, 0, 0, 0
    for now, blocks in trace:  # noqa: B007 - the tree's clock reads it
        key = blocks.tobytes()
        match = tree.match(key)
        node = tree.lock_match(match)
        tree.use(node)
        hit = len(match.pages)
        fresh = min(len(blocks) - hit, capacity - tree.num_locked_pages)
        if fresh > free:
            free += len(tree.evict(fresh - free))
        pages = match.pages + array("i", range(next_page, next_page + fresh))
        # The cost of a block grows with what stands before it: a constant part and one for attention.
        cost = sum(1.0 + (hit + i) / 64 for i in range(fresh))
        tree.insert(key, pages, cost=cost)
        tree.unlock(node)
        free, next_page = free - fresh, (next_page + fresh) % (1 << 30)
        hits, total = hits + hit, total + len(blocks)
    return hits / total


def offline_bound(trace: Trace, capacity: int) -> float:
    """Belady with bypass: evict what is needed last, or do not admit the newcomer. No online policy is better."""
    accesses = [block for _, blocks in trace for block in blocks]
    cached: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for block, following in zip(accesses, _next_uses(accesses), strict=True):
        hits += block in cached
        cached[block] = following
        heappush(farthest, (-following, block))
        while len(cached) > capacity:
            use, victim = heappop(farthest)
            if cached.get(victim) == -use:
                del cached[victim]
    return hits / len(accesses)


def _next_uses(accesses: Sequence[int]) -> Iterator[int]:
    following, seen = [0] * len(accesses), dict[int, int]()
    for i in range(len(accesses) - 1, -1, -1):
        following[i] = seen.get(accesses[i], 1 << 60)
        seen[accesses[i]] = i
    return iter(following)


def _print(name: str, trace: Trace, figures: dict[str, list[float]], capacities: Sequence[int]) -> None:
    blocks = sum(len(blocks) for _, blocks in trace)
    table = Table(title=f"hit ratio in %, {name} trace: {len(trace)} requests, {blocks} blocks")
    table.add_column("blocks in the cache")
    for capacity in capacities:
        table.add_column(f"{capacity}", justify="right")
    for policy, values in figures.items():
        table.add_row(policy, *(f"{100 * value:.1f}" for value in values))
    Console().print(table)


def _plot(figures: dict[str, list[float]], capacities: Sequence[int], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for policy, values in figures.items():
        style = {"offline bound": "k--", "infinite": "k:"}.get(policy, "o-")
        axes.plot(capacities, [100 * value for value in values], style, label=policy, markersize=4)
    axes.set(
        xscale="log", xlabel="blocks in the cache", ylabel="hit ratio, %", title="Prefix cache hit ratio by policy"
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
