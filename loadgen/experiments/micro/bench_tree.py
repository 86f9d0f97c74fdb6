"""`ramet bench tree`: time and memory of the radix tree's operations, without a model or a server."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array
from collections.abc import Iterator
from statistics import fmean, median, quantiles
from time import monotonic, thread_time
from typing import Any

from pydantic import Field, PositiveInt

from loadgen.experiments.micro.timing import timed
from loadgen.harness import Bench, Cell, Figure, repeats_of, warmup_of
from radix import POLICIES, Gone, PolicyName, RadixTree, make_policy
from radix.node import TOKEN_BYTES

PROMPT_TOKENS = 4096
_TURNS, _TURN_TOKENS = 200, 32
_EVICTED = 2000


class Tree(Bench):
    """Operations of the radix tree.

    Prompts are 1,000 of 4,096 tokens (10 system prompts x 10 documents x 10 questions); the chain is a conversation of
    200 turns, a node each. Leaves of two pages are evicted and others inserted, so that their number stays.
    """

    sections = "work"
    figures = (
        Figure("insert", "insert, us", factor=1e6),
        Figure("match", "match 4,096", factor=1e6, plotted=True),
        Figure("miss", "match 3,072 and a miss", factor=1e6),
        Figure("lock", "lock + unlock", factor=1e6),
        Figure("chain", "chain: match", factor=1e6),
        Figure("chain_lock", "chain: lock + unlock", factor=1e6),
        Figure("insert_mean", "insert, mean", factor=1e6),
        Figure("evict", "evict, us", factor=1e6, plotted=True),
        Figure("evict_p90", "p90", factor=1e6),
        Figure("evict_mean", "mean", factor=1e6),
        Figure("flush", "flush, a leaf", factor=1e6),
        Figure("bytes", "bytes a leaf", ".0f"),
    )

    repeats: int = repeats_of(3)
    warmup: int = warmup_of(0)
    page_sizes: tuple[PositiveInt, ...] = Field((1, 16), description="tokens of a page")
    leaves: tuple[PositiveInt, ...] = Field((5_000, 50_000, 200_000), description="leaves to evict from")
    policies: tuple[PolicyName, ...] = Field(POLICIES, description="of eviction")

    def cells(self) -> Iterator[Cell]:
        for page_size in self.page_sizes:
            yield {"work": "prompts", "page size": page_size}
        for policy, remembered in (*((policy, False) for policy in self.policies), ("lru", True)):
            for leaves in self.leaves:
                yield {"work": "eviction", "policy": policy, "remembered": remembered, "leaves": leaves}

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, float]:
        if cell["work"] == "prompts":
            return _prompts(draw, cell["page size"]) | _chain(draw, cell["page size"])
        return _eviction(draw, cell["policy"], cell["leaves"], cell["remembered"])


def _tokens(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(1 << 17), k=count)


def _pages(first: int, page_size: int, tokens: int) -> array[int]:
    return array("i", range(first, first + tokens // page_size))


def _prompts(draw: random.Random, page_size: int) -> dict[str, float]:
    """Median seconds to insert, match (all, and 3,072 tokens and a miss), lock and unlock, in random order."""
    systems = [_tokens(draw, 1024) for _ in range(10)]
    documents = [_tokens(draw, 2048) for _ in range(10)]
    prompts = [array("i", s + d + _tokens(draw, 1024)).tobytes() for s in systems for d in documents for _ in range(10)]
    draw.shuffle(prompts)
    other = array("i", _tokens(draw, 1024)).tobytes()
    tree = RadixTree(page_size)
    pages = [_pages(i * PROMPT_TOKENS, page_size, PROMPT_TOKENS) for i in range(len(prompts))]
    gc.collect()
    times: dict[str, list[float]] = {"insert": [], "match": [], "miss": [], "lock": []}
    for key, own in zip(prompts, pages, strict=True):
        times["insert"].append(timed(lambda key=key, own=own: tree.insert(key, own)))  # type: ignore[misc]
    for key in prompts:
        missing = key[: 3072 * TOKEN_BYTES] + other
        times["match"].append(timed(lambda key=key: tree.match(key)))  # type: ignore[misc]
        times["miss"].append(timed(lambda key=missing: tree.match(key)))  # type: ignore[misc]
        times["lock"].append(_lock_unlock(tree, key))
    return {name: median(seconds) for name, seconds in times.items()}


def _chain(draw: random.Random, page_size: int) -> dict[str, float]:
    tokens = _tokens(draw, _TURNS * _TURN_TOKENS)
    tree = RadixTree(page_size)
    for end in range(_TURN_TOKENS, len(tokens) + 1, _TURN_TOKENS):
        tree.insert(array("i", tokens[:end]).tobytes(), _pages(0, page_size, end))
    key = array("i", tokens).tobytes()
    found = median(timed(lambda: tree.match(key)) for _ in range(300))
    return {"chain": found, "chain_lock": median(_lock_unlock(tree, key) for _ in range(300))}


def _lock_unlock(tree: RadixTree, key: bytes) -> float:
    node = tree.match(key).node

    def both() -> None:
        tree.lock(node)
        tree.unlock(node)

    return timed(both)


def _eviction(draw: random.Random, policy: PolicyName, leaves: int, remembered: bool) -> dict[str, float]:
    """CPU seconds and bytes. The many insertions let the policy learn before the first eviction.

    `remembered`: remember evicted nodes, as servers do after the first request with `explain`.
    """
    watchers: list[Any] = [Gone(TOKEN_BYTES, monotonic)] if remembered else []
    tracemalloc.start()
    tree = RadixTree(1, make_policy(policy, leaves), watchers=watchers)
    keys = [array("i", [i, draw.randrange(1 << 17)]).tobytes() for i in range(leaves + _EVICTED)]
    before = tracemalloc.get_traced_memory()[0]
    for i in range(leaves):
        tree.insert(keys[i], array("i", [2 * i, 2 * i + 1]))
    memory = (tracemalloc.get_traced_memory()[0] - before) / leaves
    tracemalloc.stop()
    gc.collect()
    evicted, inserted = [], []
    for i in range(leaves, leaves + _EVICTED):
        evicted.append(timed(lambda: tree.evict(2), thread_time))
        pages = array("i", [2 * i, 2 * i + 1])
        inserted.append(timed(lambda key=keys[i], pages=pages: tree.insert(key, pages), thread_time))  # type: ignore[misc]
    flush = timed(tree.flush, thread_time) / leaves
    times = {"insert": median(inserted), "insert_mean": fmean(inserted), "evict": median(evicted)}
    times |= {"evict_p90": quantiles(evicted, n=10)[8], "evict_mean": fmean(evicted), "flush": flush}
    return times | {"bytes": memory}
