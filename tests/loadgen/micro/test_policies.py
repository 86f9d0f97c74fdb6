"""The replay of block traces: against a brute-force cache, and within its bounds."""

from __future__ import annotations

import json
import random
from array import array
from collections import OrderedDict

import pytest

from loadgen.micro.bench_policies import offline_bound, read_trace, replay
from radix import POLICIES

CAPACITIES = (60, 150, 400)


@pytest.fixture(scope="module")
def trace():
    """Conversations that grow by a few blocks a turn, as recorded ones do."""
    draw = random.Random(2)
    fresh = iter(range(10**6))
    open_chats: list[list[int]] = []
    trace = []
    for _ in range(600):
        if open_chats and draw.random() < 0.6:
            chat = draw.choice(open_chats[-30:])
        else:
            chat = []
            open_chats.append(chat)
        chat.extend(next(fresh) for _ in range(draw.randrange(1, 5)))
        trace.append((float(len(trace)), array("i", chat)))
    return trace


def brute_force_lru(trace, capacity):
    """Blocks by recency; a prompt's later blocks are older than its earlier ones, so that prefixes stay whole."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for _, blocks in trace:
        hit = 0
        while hit < len(blocks) and blocks[hit] in cache:
            hit += 1
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
        hits, total = hits + hit, total + len(blocks)
    return hits / total


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_lru_equals_a_brute_force_cache(trace, capacity):
    assert replay(trace, "lru", capacity) == pytest.approx(brute_force_lru(trace, capacity), abs=0.005)


# Blocks of the trace that each policy finds, of 3,110.
HITS = {"lru": [702, 1320, 1623], "s3fifo": [655, 1009, 1264], "gdsf": [637, 1048, 1419]}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_stays_below_the_offline_bound(trace, policy):
    total = sum(len(blocks) for _, blocks in trace)
    bounds = [offline_bound(trace, capacity) for capacity in CAPACITIES]
    shares = [replay(trace, policy, capacity) for capacity in CAPACITIES]
    assert [round(share * total) for share in shares] == HITS[policy]
    assert all(share <= bound for share, bound in zip(shares, bounds, strict=True))
    assert replay(trace, policy, 10**6) == pytest.approx(offline_bound(trace, 10**6))


def test_hashes_of_any_size_are_read(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps({"timestamp": 500 * i, "hash_ids": [1 << 60, 5 + i]}) for i in range(3)))
    assert [(s, list(blocks)) for s, blocks in read_trace(path)] == [(0.0, [0, 1]), (0.5, [0, 2]), (1.0, [0, 3])]
