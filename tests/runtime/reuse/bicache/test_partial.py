"""Reusing the beginning of a longer encoding: against a plain reading, its exact limits, and when it is done."""

from __future__ import annotations

import json
import random

import pytest

from radix import Namespace
from runtime.reuse.bicache.encoding_index import EncodingIndex
from tests.runtime.reuse.bicache.driver import DenoiseDriver, make_core
from tests.runtime.reuse.bicache.models import EOS
from tests.runtime.reuse.bicache.reference import PlainBiCache, PlainPartial
from tests.runtime.reuse.bicache.test_bicache import PREFIX, options, plainly

draw = random.Random(21)
OTHER = PREFIX[:32] + [draw.randrange(EOS) for _ in range(13)]
MODEL = {"model_type": "llada", "num_layers": 6, "hidden_size": 48, "vocab_size": 300}


def undeclared(plain):
    return {name: value for name, value in options(plain).items() if name != "prefix_tokens"}


@pytest.mark.parametrize(("native", "boundary_memory"), [(False, 0.25), (True, 0)])
def test_tokens_are_a_plain_readings(any_dir, any_plain, native, boundary_memory):
    """Of 48 encoded tokens 32 match; each depth and interval, with the boundary cold and warm."""
    core = make_core(any_dir, native_kernels=native, boundary_memory=boundary_memory)
    driver, same = DenoiseDriver(core), undeclared(any_plain)
    driver.one([*PREFIX, 1], **same, prefix_tokens=48)
    seen = {}
    for depth in range(1, any_plain.layers + 1):
        for interval in (1, 5):
            reading = PlainPartial(any_plain, PREFIX, 32, depth, interval)
            wanted = plainly(any_plain, reading, OTHER)
            for _ in range(2):
                got = driver.one(OTHER, **same, depth=depth, refresh_interval=interval, partial=True)
                assert got == wanted, (depth, interval)
            report = driver.report(driver.last())
            assert (report["cached_tokens"], report["encoded_tokens"], report["shallow_depth"]) == (32, 48, depth)
            seen[depth, interval] = wanted
    no_cache = plainly(any_plain, any_plain, OTHER)
    assert seen[1, 1] == no_cache, "the first layer's KV depends on nothing else"
    assert seen[2, 1] != plainly(any_plain, PlainBiCache(any_plain, 32, 2, 1), OTHER), "it was encoded with more"
    assert driver.one(OTHER, **same, depth=0, partial=True) == no_cache, "no depth is no reuse"
    assert driver.report(driver.last())["prefix_ratio"] == 0
    assert core.counters["partial_matches"] == 4 * any_plain.layers
    assert core.counters["encoded_prefixes"] == 1
    whole = driver.one([*PREFIX, 5], **same, depth=3, refresh_interval=2, partial=True)
    assert whole == plainly(any_plain, PlainBiCache(any_plain, 48, 3, 2), [*PREFIX, 5]), "all of it is BiCache"
    assert core.counters["partial_matches"] == 4 * any_plain.layers


@pytest.fixture
def measured(deep_dir, tmp_path):
    """A core whose table was measured for beginnings of half and of nine tenths."""
    table = {
        "model": MODEL,
        "depths": {"0": 1, "50": 4},
        "truncated": {"50": {"depths": {"0": 1, "30": 2}}, "90": {"depths": {"0": 1, "30": 3}}},
    }
    (tmp_path / "table.json").write_text(json.dumps(table))
    return lambda **more: make_core(deep_dir, depth_table=tmp_path / "table.json", **more)


def reuse(driver, prompt, **more):
    """A request's report: tokens reused, tokens of the encoding, layers."""
    driver.one(prompt, gen_length=8, **more)
    report = driver.report(driver.last())
    return report["cached_tokens"], report["encoded_tokens"], report["shallow_depth"]


def test_the_table_says_how_deep(measured):
    driver = DenoiseDriver(measured(partial_matches=True, page_size=1))
    reuse(driver, PREFIX, prefix_tokens=40)
    other = [draw.randrange(EOS) for _ in range(20)]
    assert reuse(driver, PREFIX[:38] + other) == (38, 40, 3)
    assert reuse(driver, PREFIX[:30] + other) == (30, 40, 2)
    assert reuse(driver, PREFIX[:20] + other * 4) == (20, 40, 1), "a small share of the request"
    assert reuse(driver, PREFIX[:19] + other) == (0, 0, 0), "less than half was not measured"
    assert reuse(driver, PREFIX[:40] + other) == (40, 40, 4)
    assert driver.core.counters["partial_matches"] == 3
    assert "#" in driver.core.strategy.table.version
    assert driver.core.strategy.table.version != make_core_version(measured)


def make_core_version(measured):
    """The version of the same table without what was measured for beginnings."""
    table = measured().strategy.table
    return type(table)(table.name, table.depths).version


def test_it_is_off_unless_it_is_wanted_and_was_measured(deep_dir, measured):
    driver = DenoiseDriver(measured())
    reuse(driver, PREFIX, prefix_tokens=48)
    assert reuse(driver, OTHER) == (0, 0, 0)
    assert reuse(driver, OTHER, partial=True) == (32, 48, 2)
    blind = DenoiseDriver(make_core(deep_dir, partial_matches=True))
    reuse(blind, PREFIX, prefix_tokens=48)
    assert reuse(blind, OTHER) == (0, 0, 0), "this table says nothing of beginnings"
    on = DenoiseDriver(measured(partial_matches=True))
    reuse(on, PREFIX, prefix_tokens=48)
    assert reuse(on, OTHER, partial=False) == (0, 0, 0)
    assert reuse(on, OTHER, reuse=False) == (0, 0, 0)
    assert reuse(on, OTHER, namespace=Namespace("another")) == (0, 0, 0), "tenants share nothing"


def test_a_declared_prefix_is_encoded_unless_the_request_prefers_a_beginning(measured):
    driver = DenoiseDriver(measured(partial_matches=True))
    reuse(driver, PREFIX, prefix_tokens=48)
    assert reuse(driver, OTHER, prefix_tokens=44, partial=True) == (32, 48, 2)
    assert driver.core.counters["encoded_prefixes"] == 1
    assert reuse(driver, OTHER, prefix_tokens=44) == (0, 32, 4), "whole pages of what was declared"
    assert driver.core.counters["encoded_prefixes"] == 2
    assert reuse(driver, OTHER, prefix_tokens=44, partial=True) == (32, 32, 4), "the whole goes before a beginning"
    assert reuse(driver, OTHER, prefix_tokens=0, partial=True) == (0, 0, 0)


def test_what_is_left_of_an_evicted_encoding_is_used(measured):
    core = measured(partial_matches=True)
    driver = DenoiseDriver(core)
    reuse(driver, PREFIX, prefix_tokens=48)
    core.cache.allocator.release(core.cache.tree.evict(1))
    assert reuse(driver, [*PREFIX, 5]) == (32, 48, 2), "two of three pages"
    driver.flush()
    assert reuse(driver, [*PREFIX, 5]) == (0, 0, 0)
    assert len(core.strategy.encodings) == 0, "what is gone is forgotten"


def test_the_neighbour_in_order_begins_most_alike():
    """Against looking at every encoding."""
    index, keys, T = EncodingIndex(), [], Namespace("t")
    rng = random.Random(4)
    for i in range(300):
        key = bytes(rng.choice(b"abc") for _ in range(rng.randrange(1, 12)))
        keys.append(key)
        index.add(T, key, T.for_entry("e", str(i)))
        index.add(Namespace("s"), b"ab", T.for_entry("s", str(i)))

    def alike(a, b):
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    for _ in range(300):
        key = bytes(rng.choice(b"abc") for _ in range(rng.randrange(1, 12)))
        near = [keys[int(encoding.entry.removeprefix("e:"))] for encoding in index.neighbours(T, key)]
        assert max(alike(key, other) for other in near) == max(alike(key, k) for k in keys)
    for i, key in enumerate(keys):
        index.remove(T, key, T.for_entry("e", str(i)))
    assert index.neighbours(T, keys[1]) == index.neighbours(Namespace("u"), b"") == []
    assert len(index) == 300
