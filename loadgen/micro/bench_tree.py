"""`ramet bench tree`: time and memory of the radix tree's operations, without a model or a server."""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tracemalloc
from array import array
from collections.abc import Iterable, Sequence
from time import monotonic, thread_time

from rich.console import Console
from rich.progress import track
from rich.table import Table

from loadgen.micro.timing import timed
from radix import POLICIES, Gone, PolicyName, RadixTree, Watcher, make_policy
from radix.node import TOKEN_BYTES

PROMPT_TOKENS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--leaves", type=int, nargs="+", default=[5_000, 50_000, 200_000], help="leaves to evict from")
    parser.add_argument("--seed", type=int, help="default: another one every time")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print two tables."""
    draw = random.Random(arguments.seed)
    console = Console()
    table = Table(title="1,000 prompts of 4,096 tokens (10 system prompts x 10 documents x 10 questions), microseconds")
    for column in ("operation", "page size", "p50", "p90"):
        table.add_column(column, justify="right")
    for page_size in (1, 16):
        for name, seconds in {**_prompts(draw, page_size), **_chain(draw, page_size)}.items():
            values = statistics.quantiles(seconds, n=10)
            table.add_row(name, f"{page_size}", f"{1e6 * statistics.median(seconds):.1f}", f"{1e6 * values[8]:.1f}")
    console.print(table)
    table = Table(title="insertion and eviction of a leaf of two pages, microseconds of CPU a call, and memory")
    for column in ("policy", "leaves", "insert p50", "mean", "evict p50", "p90", "mean", "flush, per leaf", "bytes"):
        table.add_column(column, justify="right")
    for policy in POLICIES:
        for leaves in arguments.leaves:
            table.add_row(policy, f"{leaves}", *_eviction(draw, policy, leaves))
    for leaves in arguments.leaves:  # as servers remember what has left, once they are asked to explain misses
        table.add_row("lru, remembered", f"{leaves}", *_eviction(draw, "lru", leaves, [Gone(TOKEN_BYTES, monotonic)]))
    console.print(table)
    return 0


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(1 << 17) for _ in range(count)]


def _pages(first: int, page_size: int, tokens: int) -> array[int]:
    return array("i", range(first, first + tokens // page_size))


def _prompts(draw: random.Random, page_size: int) -> dict[str, list[float]]:
    """Insert, match (full, 3,072 and a miss), lock and unlock; the order of prompts is random."""
    systems = [_tokens(draw, 1024) for _ in range(10)]
    documents = [_tokens(draw, 2048) for _ in range(10)]
    prompts = [array("i", s + d + _tokens(draw, 1024)).tobytes() for s in systems for d in documents for _ in range(10)]
    draw.shuffle(prompts)
    other = array("i", _tokens(draw, 1024)).tobytes()
    tree = RadixTree(page_size)
    pages = [_pages(i * PROMPT_TOKENS, page_size, PROMPT_TOKENS) for i in range(len(prompts))]
    gc.collect()
    times: dict[str, list[float]] = {"insert": [], "match all": [], "match 3,072": [], "lock + unlock": []}
    for key, run_of_pages in zip(prompts, pages, strict=True):
        times["insert"].append(timed(lambda key=key, p=run_of_pages: tree.insert(key, p)))  # type: ignore[misc]
    for key in prompts:
        times["match all"].append(timed(lambda key=key: tree.match(key)))  # type: ignore[misc]
        missing = key[: 3072 * 4] + other
        times["match 3,072"].append(timed(lambda key=missing: tree.match(key)))  # type: ignore[misc]
        times["lock + unlock"].append(_lock_unlock(tree, key))
    return times


def _chain(draw: random.Random, page_size: int) -> dict[str, list[float]]:
    """A conversation of 200 turns, a node each."""
    turn = 32
    tokens = _tokens(draw, 200 * turn)
    tree = RadixTree(page_size)
    for end in range(turn, len(tokens) + 1, turn):
        tree.insert(array("i", tokens[:end]).tobytes(), _pages(0, page_size, end))
    key = array("i", tokens).tobytes()
    return {
        "200-node chain: match": [timed(lambda: tree.match(key)) for _ in range(300)],
        "200-node chain: lock + unlock": [_lock_unlock(tree, key) for _ in range(300)],
    }


def _lock_unlock(tree: RadixTree, key: bytes) -> float:
    node = tree.match(key).node

    def both() -> None:
        tree.lock(node)
        tree.unlock(node)

    return timed(both)


def _eviction(draw: random.Random, policy: PolicyName, leaves: int, watchers: Sequence[Watcher] = ()) -> Iterable[str]:
    """Leaves below the root; after each eviction another one comes in, so that their number stays.

    There are so many that the policy has learned by the time of the first eviction.
    """
    tracemalloc.start()
    tree = RadixTree(1, make_policy(policy, leaves), watchers=watchers)
    keys = [array("i", [i, draw.randrange(1 << 17)]).tobytes() for i in range(leaves + 2000)]
    before = tracemalloc.get_traced_memory()[0]
    for i in range(leaves):
        tree.insert(keys[i], array("i", [2 * i, 2 * i + 1]))
    memory = (tracemalloc.get_traced_memory()[0] - before) / leaves
    tracemalloc.stop()
    gc.collect()
    evicted, inserted = [], []
    for i in track(range(leaves, leaves + 2000), description=f"{policy}: evicting from {leaves}"):
        evicted.append(timed(lambda: tree.evict(2), thread_time))
        pages = array("i", [2 * i, 2 * i + 1])
        inserted.append(timed(lambda key=keys[i], pages=pages: tree.insert(key, pages), thread_time))  # type: ignore[misc]
    everything = timed(tree.flush, thread_time) / leaves
    return *_numbers(inserted, p90=False), *_numbers(evicted), f"{1e6 * everything:.1f}", f"{memory:.0f}"


def _numbers(seconds: list[float], p90: bool = True) -> Iterable[str]:
    values = (statistics.median(seconds), statistics.quantiles(seconds, n=10)[8], statistics.fmean(seconds))
    return (f"{1e6 * value:.1f}" for value in (values if p90 else values[::2]))
