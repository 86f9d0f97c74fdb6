"""The simulated fleet: conserved blocks, and what routers are known to do."""

from __future__ import annotations

from array import array

import pytest

from loadgen.micro.fleet import Fleet, routes
from server.cli import main

# Ten conversations of six turns, one turn of each after another.
TRACE = [
    (6.0 * turn + 0.5 * chat, array("i", [1000 * chat + n for n in range(4 + 4 * turn)]))
    for turn in range(6)
    for chat in range(10)
]


def drive(name: str, replicas: int = 5, capacity: int = 1000, block_s: float = 0.01):
    return Fleet(*routes(replicas, 16, 0.1, 0)[name], replicas, capacity, block_s).run(TRACE)


@pytest.mark.parametrize("name", routes(1, 1, 1, 0))
def test_every_block_is_cached_or_computed(name):
    found = drive(name)
    assert found.blocks == sum(len(blocks) for _, blocks in TRACE)
    assert found.hits + sum(found.computed) == found.blocks
    assert len(found.waits_s) == len(TRACE)
    assert min(found.waits_s) >= 0


def test_a_prefix_is_found_where_it_is():
    """Of a conversation nothing but its last four blocks is new."""
    best = sum(len(blocks) - 4 for _, blocks in TRACE)
    assert drive("prefix and work").hits == best
    assert drive("prefix and work", replicas=1).hits == best
    assert drive("random").hits < 0.8 * best


def test_a_hot_prefix_does_not_hold_up_everybody():
    hot = [(0.01 * n if n else -9.0, array("i", [1, 2, 3, 4, 100 + n])) for n in range(400)]

    def imbalance(name: str) -> float:
        return Fleet(*routes(8, 2, 0.1, 0)[name], 8, 1000, 0.05).run(hot).imbalance

    assert imbalance("longest prefix") > 4
    assert imbalance("prefix and work") < 1.5


def test_a_small_cache_keeps_to_its_size():
    fleet = Fleet(*routes(2, 16, 0.1, 0)["prefix and work"], 2, 30, 0.01)
    fleet.run(TRACE)
    assert all(replica.tree.num_pages + replica.free == 30 for replica in fleet._replicas)
    assert all(len(fleet._known.index.held(n)) == replica.tree.num_pages for n, replica in enumerate(fleet._replicas))
    assert set(fleet._known.loads.values()) == {0}


def test_the_command_prints_a_row_for_each_router(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    lines = [f'{{"timestamp": {1000 * at:.0f}, "hash_ids": {blocks.tolist()}}}' for at, blocks in TRACE]
    trace.write_text("\n".join(lines) + "\n")
    record = tmp_path / "figures.json"
    assert main(["bench", "routing", str(trace), "--replicas", "2", "--seeds", "1", "--json", str(record)]) == 0
    assert "prefix and work" in capsys.readouterr().out
    assert record.read_text().count("imbalance") == 7
