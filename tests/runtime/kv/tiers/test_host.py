"""Blocks in the memory of the host, against a plain model."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kv.tiers.host import HostStore
from runtime.kv.tiers.store import Entry, Limits, Usage

KEYS = [bytes([n]) * 16 for n in range(8)]
TENANTS = ["a", "b", "c"]
LIMITS = Limits(100, {"a": 40, "b": 1000}, 60)


class Plain:
    """A list from the least to the most recently used."""

    def __init__(self):
        self.blocks = OrderedDict()

    def put(self, key, data, tenant):
        quota = {"a": 40, "b": 100, "c": 60}[tenant]
        if len(data) > quota:
            return False
        self.blocks.pop(key, None)
        while sum(len(d) for d, t in self.blocks.values() if t == tenant) + len(data) > quota:
            self.blocks.pop(next(k for k, (_, t) in self.blocks.items() if t == tenant))
        while sum(len(d) for d, _ in self.blocks.values()) + len(data) > 100:
            self.blocks.popitem(last=False)
        self.blocks[key] = (data, tenant)
        return True


# Mostly several blocks at once.
SIZES = st.one_of(st.integers(1, 25), st.integers(0, 110))
STEPS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(KEYS), SIZES, st.sampled_from(TENANTS)),
    st.tuples(st.just("get"), st.sampled_from(KEYS)),
    st.tuples(st.just("touch"), st.lists(st.sampled_from(KEYS), max_size=3)),
    st.tuples(st.just("delete"), st.lists(st.sampled_from(KEYS), max_size=3)),
    st.tuples(st.just("erase"), st.sampled_from([*TENANTS, None])),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, min_size=20, max_size=60))
def test_random_lives(steps):
    store, plain = HostStore(LIMITS, clock=lambda: 1.0), Plain()
    for step, *given_ in steps:
        if step == "put":
            key, size, tenant = given_
            data = bytes([size]) * size
            parts = [data[: size // 2], memoryview(data)[size // 2 :]]
            assert store.put(key, parts, tenant, "evicted") == plain.put(key, data, tenant)
        elif step == "get":
            found = plain.blocks.get(given_[0])
            assert store.get(given_[0]) == (found and found[0])
            if found:
                plain.blocks.move_to_end(given_[0])
        elif step == "touch":
            store.touch(given_[0])
            for key in given_[0]:
                if key in plain.blocks:
                    plain.blocks.move_to_end(key)
        elif step == "delete":
            store.delete(given_[0])
            for key in given_[0]:
                plain.blocks.pop(key, None)
        else:
            gone = [key for key, (_, tenant) in plain.blocks.items() if given_[0] in (None, tenant)]
            assert store.erase(given_[0]) == len(gone)
            for key in gone:
                del plain.blocks[key]
        assert store.contains_many(KEYS) == [key in plain.blocks for key in KEYS]
        kept = [(entry.key, entry.size, entry.tenant) for entry in store.entries()]
        assert kept == [(key, len(data), tenant) for key, (data, tenant) in plain.blocks.items()]
        assert store.usage() == Usage(sum(size for _, size, _ in kept), len(kept), 100)


@pytest.mark.parametrize("use", [lambda store, key: store.get(key), lambda store, key: store.touch([key])])
def test_a_use_saves_a_block_from_eviction(use):
    for tenants in (("a", "a", "a"), ("a", "b", "c")):
        store = HostStore(Limits(2, {"a": 2}))
        for key, tenant in zip(KEYS[:2], tenants, strict=False):
            store.put(key, [b"x"], tenant, "evicted")
        use(store, KEYS[0])
        store.put(KEYS[2], [b"x"], tenants[2], "evicted")
        assert store.contains_many(KEYS[:3]) == [True, False, True]


def test_an_entry_tells_of_its_uses():
    now = 1.0
    store = HostStore(Limits(100), clock=lambda: now)
    store.put(KEYS[0], [b"x", b"yz"], "a", "second use")
    now = 5.0
    assert store.get(KEYS[0]) == b"xyz"
    store.touch(KEYS)
    assert list(store.entries()) == [Entry(KEYS[0], "a", 3, 5.0, 1, "second use")]
    store.close()
    assert store.usage() == Usage(0, 0, 100)


def test_what_was_read_stays_after_its_eviction():
    store = HostStore(Limits(4))
    data = bytearray(b"abcd")
    store.put(KEYS[0], [data], "", "evicted")
    data[:] = b"zzzz"
    found = store.get(KEYS[0])
    assert store.put(KEYS[1], [b"efgh"], "", "evicted")
    assert found == b"abcd"
    assert store.get(KEYS[0]) is None
