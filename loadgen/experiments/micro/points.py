"""Replays of conversations on the caches of models with recurrent layers, without a model: only look-ups and memory."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from runtime.config import CacheConfig
from runtime.features.hybrid.strategy import HybridLease, HybridPrefix
from runtime.kv import segments
from runtime.kv.cache import PagedCache
from runtime.kv.pool import KVPool
from runtime.kv.states import StatePool
from runtime.params import SamplingParams
from runtime.protocol import AddRequest
from runtime.request import Found, Request, Work
from runtime.reuse.prefix import PrefixLease, PrefixStrategy
from runtime.sampler_state import SamplerState

STOP, PAGE = 2, 16
_VOCAB = 1 << 20
_CPU = torch.device("cpu")
# Bytes of a token's KV: one layer, head and value of float32. A state is as many times larger as in a real model.
_TOKEN = 8


class Exchange(NamedTuple):
    """A request: when it comes (seconds), its prompt and the output that it gets, int32."""

    at_s: float
    prompt: array[int]
    output: array[int]


def sessions(kind: str, number: int, draw: random.Random) -> list[Exchange]:
    """Requests of `number` sessions, in the order of arrival; a message ends with `STOP`.

    `agents`: one of four system prompts with tools, of 3,000 to 9,000 tokens, a task, and 5 to 25 turns with results of
    tools. `chats`: one of four system prompts of 200 to 900 tokens, and 2 to 10 turns. `reasoning`: such chats, whose
    answers begin with reasoning that later prompts leave out.
    """
    fresh = np.random.default_rng(draw.randrange(1 << 30))

    def text(least: int, most: int) -> list[int]:
        return cast(list[int], fresh.integers(10, _VOCAB, draw.randint(least, most)).tolist())

    is_agent = kind == "agents"
    least, most = (3000, 9000) if is_agent else (200, 900)
    systems = [[*text(least, most), STOP] for _ in range(4)]
    numbers, asks = count(), []
    due: list[tuple[float, int, list[int], int]] = []
    start_s = 0.0
    for _ in range(number):
        start_s += draw.expovariate(1 / 8)
        turns = draw.randint(5, 25) if is_agent else draw.randint(2, 10)
        first = [*draw.choice(systems), 3, 4, *text(50, 800 if is_agent else 300), STOP]
        heappush(due, (start_s, next(numbers), first, turns))
    while due:
        at_s, _, past, left = heappop(due)
        thoughts = [5, *text(200, 1500), 6] if kind == "reasoning" else []
        answer = [*text(30, 400), STOP]
        begin = [3, 7, 8]  # the generation prompt
        asks.append(Exchange(at_s, array("i", [*past, *begin]), array("i", [*thoughts, *answer])))
        if left > 1:
            more = text(100, 2500) if is_agent else text(20, 300)
            pause_s = draw.uniform(2, 30) if is_agent else draw.uniform(10, 300)
            heappush(due, (at_s + pause_s, next(numbers), [*past, *begin, *answer, 3, 4, *more, STOP], left - 1))
    return asks


def blocks_as_tokens(trace: Iterable[tuple[float, Sequence[int]]], size: int) -> list[Exchange]:
    """Requests of a trace of block ids: each block is `size` tokens of its own, and the outputs are unknown.

    Without the last block of each prompt: it is partial, so the next turn's block has another id.
    """
    asks = []
    for number, (at_s, blocks) in enumerate(trace):
        tokens = (np.array(blocks[:-1] or blocks, dtype=np.int64)[:, None] * size + np.arange(size)).ravel() + 10
        prompt, output = array("i", tokens.astype(np.int32).tobytes()), array("i", [3 + number % 6] * 200)
        asks.append(Exchange(at_s, prompt, output))
    return asks


class _BlocksLease(HybridLease):
    def places_for(self, found: Found) -> list[int]:
        return [place for place in range(528, self.request.prompt_len, 528) if place > found.tokens]


class AtBlocks(HybridPrefix):
    """A point behind every 528 tokens of a prompt."""

    def open(self, request: Request, ask: None) -> HybridLease:
        return _BlocksLease(self, request)


class _EndsLease(HybridLease):
    def places_for(self, found: Found) -> list[int]:
        return []


class AtEnds(HybridPrefix):
    """One point for each request, where its output ends."""

    def open(self, request: Request, ask: None) -> HybridLease:
        return _EndsLease(self, request)


PLACEMENTS: dict[str, type[PrefixStrategy]] = {
    "every token": PrefixStrategy,
    "ramet": HybridPrefix,
    "528 tokens": AtBlocks,
    "one a request": AtEnds,
}


class Replay(NamedTuple):
    """Cached tokens and tokens of all prompts; pages of KV and of points at the end."""

    cached: int
    asked: int
    kv_pages: int
    point_pages: int


def replay(asks: Sequence[Exchange], placement: str, pages: int, cost: int) -> Replay:
    """One request after another, on a pool of `pages`. `cost`: tokens whose KV takes as much memory as a state."""
    now = [0.0]
    pool = KVPool(1, pages, PAGE, 1, 1, torch.float32, _CPU)
    cache = PagedCache(pool, CacheConfig(), clock=lambda: now[0])
    kind = PLACEMENTS[placement]
    if issubclass(kind, HybridPrefix):
        states = StatePool([(cost * _TOKEN // 4,)], 16, _CPU)
        strategy: PrefixStrategy = kind(cache, 1, states, (STOP,))
    else:
        strategy = kind(cache, 1)
    cached = 0
    for number, ask in enumerate(asks):
        now[0] = ask.at_s
        cached += _serve(strategy, ask, f"{number}")
    points = sum(len(node.pages) for node in cache.tree.nodes() if node.is_attached)
    return Replay(cached, sum(len(ask.prompt) for ask in asks), cache.tree.num_pages - points, points)


def _serve(strategy: PrefixStrategy, ask: Exchange, rid: str) -> int:
    """Serve a request without a model; returns its cached tokens."""
    params = SamplingParams(max_new_tokens=len(ask.output))
    length = len(ask.prompt)
    request = Request(
        AddRequest(rid, b""),
        SamplerState(params, frozenset(), None),
        segments.Sequence(ask.prompt[:]),
        length,
        length + len(ask.output),
        strategy,
        cast(Any, None),
    )
    lease = request.lease = strategy.open(request, None)
    if not lease.admit(lease.look(), 0):
        return 0
    _compute(lease)
    request.tokens.extend(ask.output)
    if lease.grow(ahead=len(ask.output) - 2):
        del request.tokens[-1:]  # the last token is not computed
        _compute(lease)
    lease.release(keep=True)
    return max(request.cached_tokens, 0)


def _compute(lease: PrefixLease) -> None:
    work = lease.work(lease.request.num_remaining)
    work = Work(lease.request, work.start, work.count, work.count)
    lease.take_slots(work)
    lease.book(work, [], 0.0)
