"""`ramet bench tree` on small trees."""

from __future__ import annotations

from radix import POLICIES


def test_every_operation_is_measured(measured):
    prompts, *evictions = measured("tree", "--page-sizes", 16, "--leaves", 50)
    assert [one["policy"] for one in evictions] == [*POLICIES, "lru"]
    assert min(prompts[name] for name in ("insert", "match", "miss", "lock", "chain", "chain_lock")) > 0
    for one in evictions:
        assert 0 < one["evict"] <= one["evict_p90"]
        assert min(one["insert"], one["flush"], one["bytes"]) > 0
