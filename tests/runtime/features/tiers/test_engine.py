"""Engines of causal models with tiers: the tokens are those of an engine without a cache."""

import random
import threading
from array import array

import pytest
import torch

from radix import Namespace
from runtime.features.tiers.tiering import Tiering
from runtime.features.tiers.worker import TierWorker
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.features.tiers.conftest import FlakyStore
from tests.runtime.features.tiers.engines import NEW, draw, evict, loaded, open_core, options_of

TIERS = ("host", "disk", "store")
PROMPTS = [draw(0, 150) + draw(i, 40 + 10 * i) for i in range(4)]
# Whole blocks of 64 tokens; the last token of a prompt is never looked up.
WHOLE = [(len(prompt) - 1) // 64 * 64 for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(ids_dir):
    driver = Driver(make_core(ids_dir, prefix_cache=False, kernels="torch"))
    return driver.together(PROMPTS, max_new_tokens=NEW)


@pytest.mark.parametrize("tier", TIERS)
def test_evicted_blocks_come_back_from_each_tier(ids_dir, tmp_path, expected, tier):
    core = open_core(ids_dir, **options_of(tier, tmp_path))
    driver = Driver(core)
    assert driver.together(PROMPTS, max_new_tokens=NEW) == expected
    for i, prompt in enumerate(PROMPTS):
        evict(core)
        assert driver.together([prompt], max_new_tokens=NEW) == [expected[i]]
        last = list(driver.events)[-1]
        assert loaded(driver, last) == {tier: WHOLE[i]}
        assert driver.cached(last) == WHOLE[i]
    assert list(core.strategies.opened) == [core.strategies.default.name], "no request asked for another one"
    core.close()


@pytest.mark.parametrize("tier", ["disk", "store"])
def test_a_restart_and_another_replica_find_what_was_computed(ids_dir, tmp_path, expected, tier):
    first = open_core(ids_dir, **options_of(tier, tmp_path))
    driver = Driver(first)
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    evict(first)
    second = Driver(open_core(ids_dir, **options_of(tier, tmp_path)))
    assert second.together(PROMPTS[:1], max_new_tokens=NEW) == expected[:1]
    assert loaded(second, "r0") == {tier: WHOLE[0]}
    first.close()
    second.core.close()
    third = Driver(open_core(ids_dir, **options_of(tier, tmp_path)))
    assert third.together(PROMPTS, max_new_tokens=NEW) == expected
    assert loaded(third, "r0") == {tier: WHOLE[0]}
    assert loaded(third, "r1") == {tier: 128}
    third.core.close()


def test_what_is_used_twice_is_written_at_once(ids_dir, tmp_path, expected):
    core = open_core(ids_dir, **options_of("host", tmp_path))
    driver = Driver(core)
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    core.part(Tiering).tiers.worker.drain()
    assert core.part(Tiering).tiers.worker.states()["host"].counts.keys() == {"wanted"}
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    core.part(Tiering).tiers.worker.drain()
    driver.flush()
    assert core.cache.tree.num_pages == 0
    assert driver.together(PROMPTS[:1], max_new_tokens=NEW) == expected[:1]
    assert loaded(driver, "r2") == {"host": WHOLE[0]}
    core.close()


def test_a_prefix_that_several_requests_begin_to_read_in_one_step_is_written(ids_dir, tmp_path):
    core = open_core(ids_dir, **options_of("host", tmp_path))
    driver = Driver(core)
    driver.together([[*PROMPTS[0][:128], *draw(i, 24)] for i in range(4)], max_new_tokens=NEW)
    core.part(Tiering).tiers.worker.drain()
    assert core.part(Tiering).tiers.worker.states()["host"].counts["written"] >= 2
    core.close()


def test_pages_that_nobody_has_copied_yet_are_copied_by_those_who_write_into_them(ids_dir, tmp_path, expected):
    """The thread that copies stands still while all pages are used again and again."""
    core = open_core(ids_dir, pool_tokens=256, **options_of("host", tmp_path))
    driver, gate = Driver(core), threading.Event()
    core.part(Tiering).tiers.worker._gatherer.run(gate.wait)
    for i, prompt in enumerate(PROMPTS):
        assert driver.together([prompt], max_new_tokens=NEW) == [expected[i]]
    gate.set()
    evict(core)
    for i, prompt in enumerate(PROMPTS):
        assert driver.together([prompt], max_new_tokens=NEW) == [expected[i]]
        assert loaded(driver, f"r{len(PROMPTS) + i}")["host"] >= 64
        core.part(Tiering).tiers.worker.drain()
    core.close()


def test_a_request_whose_loaded_kv_is_always_gone_is_computed(ids_dir, tmp_path, expected):
    """After a few loads; a later request has as many again."""
    core = open_core(ids_dir, **options_of("host", tmp_path))
    driver, tiers = Driver(core), core.part(Tiering).tiers
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    evict(core)
    wake = core.scheduler.wake
    core.scheduler.wake = lambda *event: (evict(core), wake(*event))[1]
    for again in (1, 2):
        driver.add(f"{again}", PROMPTS[0], max_new_tokens=NEW)
        while core.scheduler.blocked and tiers.counters["tier_loads"] < 20:
            driver.step()
        del core.scheduler.wake
        driver.run()
        core.scheduler.wake = lambda *event: (evict(core), wake(*event))[1]
        assert driver.tokens[f"{again}"] == expected[0]
        assert tiers.counters["tier_loads"] == 4 * again
        assert not core.part(Tiering)._num_loads
        evict(core)
    core.close()


def test_a_load_for_which_there_is_no_room_is_tried_once(ids_dir, tmp_path, expected):
    core = open_core(ids_dir, pool_tokens=240, **options_of("host", tmp_path))
    driver, tiers, begun = Driver(core), core.part(Tiering).tiers, []
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    evict(core)
    begin = tiers._begin
    tiers._begin = lambda load: (begun.append(load), begin(load))
    assert driver.together(PROMPTS[:1], max_new_tokens=NEW) == expected[:1]
    assert (len(begun), loaded(driver, "r1")) == (1, {})
    core.close()


def test_two_requests_that_want_the_same_blocks_share_a_load(ids_dir, tmp_path, expected):
    core = open_core(ids_dir, **options_of("host", tmp_path))
    driver = Driver(core)
    driver.together(PROMPTS, max_new_tokens=NEW)
    evict(core)
    assert driver.together([PROMPTS[0]] * 3, max_new_tokens=NEW) == [expected[0]] * 3
    assert [loaded(driver, f"r{i}") for i in (4, 5, 6)] == [{"host": WHOLE[0]}] * 3
    assert core.part(Tiering).tiers.loaded_tokens == {"host": WHOLE[0]}
    core.close()


def test_a_store_that_fails_or_hangs_costs_bounded_time(ids_dir, tmp_path, expected):
    core = open_core(ids_dir, **options_of("host", tmp_path))
    store, worker = FlakyStore(), core.part(Tiering).tiers.worker
    worker.detach("host")
    worker._tiers = TierWorker(worker.form, [store])._tiers
    driver = Driver(core)
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    evict(core)
    store.gate.clear()
    core.part(Tiering).tiers._seconds, core.part(Tiering).tiers._rows = 1e-3, 1000.0
    assert driver.together(PROMPTS[:1], max_new_tokens=NEW) == expected[:1]
    assert loaded(driver, "r1") == {}
    assert core.part(Tiering).tiers.counters["tier_loads_late"] == 1
    store.error = OSError("gone")
    store.gate.set()
    driver.flush()
    assert driver.together(PROMPTS[:1], max_new_tokens=NEW) == expected[:1]
    store.error = None
    core.close()


@pytest.mark.parametrize("change", [{"page_size": 16}, {"kv_dtype": "fp8"}])
def test_blocks_of_another_layout_are_not_found(ids_dir, tmp_path, change):
    core = open_core(ids_dir, **options_of("disk", tmp_path))
    Driver(core).together(PROMPTS[:1], max_new_tokens=NEW)
    evict(core)
    core.close()
    other = open_core(ids_dir, **options_of("disk", tmp_path), **change)
    driver = Driver(other)
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    assert loaded(driver, "r0") == {}
    evict(other)
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    assert loaded(driver, "r1") == {"disk": WHOLE[0]}
    assert driver.tokens["r0"] == driver.tokens["r1"]
    other.close()


def test_what_must_not_be_stored_outlives_nothing(ids_dir, tmp_path, expected):
    core = open_core(ids_dir, kv_events="tcp://127.0.0.1:*", **options_of("host", tmp_path))
    driver = Driver(core)
    for _ in range(2):
        for i in (0, 1):
            driver.add(f"r{len(driver.tokens)}", PROMPTS[i], max_new_tokens=NEW, store=False)
        driver.run()
    assert [driver.tokens[f"r{i}"] for i in range(4)] == [*expected[:2], *expected[:2]]
    assert all(driver.cached(rid) == 0 for rid in driver.events)
    assert core.cache.tree.num_pages == 0
    assert core.cache.events.take() == []
    evict(core)
    assert core.part(Tiering).tiers.worker.states()["host"].counts.keys() == {"wanted"}
    assert core.cache.allocator.num_free == core.cache.pool.num_pages
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    driver.add("reads", PROMPTS[0], max_new_tokens=NEW, store=False)
    driver.run()
    assert driver.cached("reads") == len(PROMPTS[0]) - 1
    assert driver.tokens["reads"] == expected[0]
    core.close()


@pytest.mark.parametrize(("tier", "seed"), [("host", 0), ("disk", 1), ("store", 2)])
def test_lives(ids_dir, tmp_path, tier, seed):
    """Arrivals, aborts, flushes, retraction, unstored requests and lost blocks, in a pool that holds little."""
    luck = random.Random(f"{tier} {seed}")
    page = luck.choice([4, 16])
    core = open_core(ids_dir, page_size=page, pool_tokens=320, chunk_tokens=17, max_running=4,
                     tenant_quota=240 // page, pin_budget=0.5, **options_of(tier, tmp_path))  # fmt: skip
    driver = Driver(core)
    plain = Driver(make_core(ids_dir, prefix_cache=False, kernels="torch"))
    roots = [draw(100 + i, 200) for i in range(3)]
    asked: dict[str, list[int]] = {}
    for i in range(40):
        prompt = [*luck.choice(roots)[: luck.randrange(201)], *draw(i, luck.randrange(1, 9))]
        asked[str(i)] = prompt
        driver.add(str(i), prompt, max_new_tokens=luck.choice([0, 1, 6]), store=luck.random() < 0.9,
                   namespace=Namespace(luck.choice("xy")))  # fmt: skip
        if luck.random() < 0.15 and core.requests:
            driver.abort(luck.choice(list(core.requests)))
        if luck.random() < 0.1:
            driver.flush()
        for _ in range(luck.randrange(12)):
            driver.step()
        if i % 3 == 0:  # however slow the disk is, something is there to be loaded
            core.part(Tiering).tiers.worker.drain()
    driver.run()
    assert set(driver.finish) == set(asked)
    good = [rid for rid, finish in driver.finish.items() if finish.type == "length" and driver.tokens[rid]]
    found = plain.together([asked[rid] for rid in good], max_new_tokens=6)
    for rid, tokens in zip(good, found, strict=True):
        assert driver.tokens[rid] == tokens[: len(driver.tokens[rid])]
    assert core.part(Tiering).tiers.loaded_tokens[tier] > 0
    assert not core.cache.held
    core.close()


def test_pool_pages_are_read_and_written_as_they_lie():
    from runtime.kv.pool import KVPool

    shape = (3, 8, 4, 2, 5, torch.bfloat16, torch.device("cpu"))
    one, other = KVPool(*shape), KVPool(*shape)
    one.k.normal_()
    one.v.normal_()
    data = one.read_pages(array("i", [6, 2, 3])).numpy().data
    other.write_pages(array("i", [1, 0]), data, skipped=1)
    assert torch.equal(other.k[:, :8], torch.cat([one.k[:, 12:16], one.k[:, 8:12]], 1))
    assert torch.equal(other.v[:, :8], torch.cat([one.v[:, 12:16], one.v[:, 8:12]], 1))
    assert not other.k[:, 8:].any()
    with pytest.raises(ValueError, match="cannot reshape"):
        other.write_pages(array("i", [1, 0]), data)
