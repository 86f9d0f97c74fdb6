"""Pins and holds in the engine: at their limits under load, live requests still finish."""

import random
import time
from array import array

import pytest

from radix import POLICIES, Namespace
from runtime.calls import FlushCache, GetPins, PinNode, RemovePin
from runtime.protocol import Forget
from tests.runtime.engine.driver import Driver, call, make_core
from tests.tiny import VOCAB


def pinned(core):
    return call(core, GetPins())


@pytest.fixture
def driver(ids_dir):
    return Driver(make_core(ids_dir, pool_tokens=640, pin_budget=0.5))


PREFIX = list(range(1000, 1100))


def test_a_pin_survives_flushes_and_floods_until_it_is_let_go(driver):
    assert driver.pin(PREFIX, name="system") is None, "it is computed first"
    driver.run()
    (made,) = driver.answer()
    assert driver.core.state()["generation_tokens"] == 0
    assert (made.name, made.tokens, made.expires_in_s) == ("system", 96, None)
    driver.flush()
    driver.together([[i] * 60 for i in range(40)], max_new_tokens=2)
    driver.add("again", PREFIX, max_new_tokens=1)
    driver.run()
    assert driver.cached("again") == 96
    assert pinned(driver.core).pinned_tokens == 96
    assert call(driver.core, RemovePin(made.id))
    assert not call(driver.core, RemovePin(made.id))
    assert driver.flush().live_tokens == 0


def test_a_call_that_is_given_up_computes_no_more(driver):
    for number in (7, 8):
        assert driver.pin([number, *PREFIX], number) is None
    driver.core.handle(Forget(7))
    driver.run()
    assert driver.answer(7) is None
    assert len(driver.answer(8)) == 1
    assert driver.core.counters["prefill_tokens"] == 96


def test_flush_takes_pins_only_when_asked(driver):
    driver.together([PREFIX], max_new_tokens=1)
    driver.pin(PREFIX)
    assert call(driver.core, FlushCache()).live_tokens == 96
    assert call(driver.core, FlushCache(pins=True)).live_tokens == 0


def test_a_node_is_pinned_where_it_lies(driver):
    namespace = Namespace("t", "s").for_entry("kind", "1")
    cache = driver.core.cache
    pages = cache.allocator.allocate(3)
    cache.tree.insert(array("i", PREFIX[:48]).tobytes(), pages, namespace)
    made = call(driver.core, PinNode(pages[0], 0))
    assert made.tokens == 48
    assert cache.pins.pins[made.id].node.namespace == namespace
    assert call(driver.core, PinNode(pages[0], 16)) is None
    call(driver.core, FlushCache())
    assert cache.tree.num_pinned_pages == cache.tree.num_pages == 3


def test_a_request_that_waits_for_room_is_one_use_of_its_prefix(ids_dir):
    driver = Driver(make_core(ids_dir, pool_tokens=640))
    driver.together([PREFIX], max_new_tokens=1)
    tree = driver.core.cache.tree
    driver.add("big", [7] * 400, max_new_tokens=60)
    driver.step()
    driver.add("again", [*PREFIX, *range(200)], max_new_tokens=1)
    for _ in range(40):
        driver.step()
    assert "big" not in driver.finish
    assert not driver.events["again"], "there is no room for both"
    driver.run()
    assert driver.cached("again") == 96
    node = tree.match(array("i", PREFIX[:96]).tobytes()).node
    assert (node.hits, sum(tree.stats.reuse_gap_s.counts)) == (1, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_full_load_with_pins_holds_and_quotas_at_their_limits(ids_dir, policy):
    core = make_core(
        ids_dir, pool_tokens=320, page_size=4, pin_budget=0.6, hold_time="9:99", eviction_policy=policy, max_running=8,
        tenant_quota=60,
    )  # fmt: skip
    driver, draw = Driver(core), random.Random(5)
    plain = Driver(make_core(ids_dir, prefix_cache=False))
    roots = [[draw.randrange(VOCAB) for _ in range(30)] for _ in range(4)]
    prompts = {str(i): draw.choice(roots) + [draw.randrange(VOCAB) for _ in range(20)] for i in range(40)}

    def between(step: int) -> None:
        if step % 3 == 0:
            driver.pin(draw.choice(roots), step)

    for rid, prompt in prompts.items():
        driver.add(
            rid,
            prompt,
            max_new_tokens=draw.choice([4, 60]),
            hold_s=draw.choice([None, 0.0, 99.0]),
            namespace=draw.choice([Namespace(), Namespace("t", "1"), Namespace("t", "2")]),
        )
    driver.run(between)
    state = core.state()
    assert state.labelled["evicted_tokens_by_cause"]["quota"] > 0
    assert core.cache.tree.quotas.pages(Namespace("t")) <= 60
    assert state["pages_pinned"] > 0
    assert (0 < state["pages_held"] <= 40, state["held_pages_lost"] > 0, state["held_pages_broken"] > 0) == (True,) * 3
    for rid in list(prompts)[:8]:
        assert driver.tokens[rid] == plain.together([prompts[rid]], max_new_tokens=len(driver.tokens[rid]))[0]


@pytest.mark.parametrize("jump_s", [1e9, -1e9])
def test_a_clock_that_jumps_ends_no_pin(ids_dir, monkeypatch, jump_s):
    driver = Driver(make_core(ids_dir, pool_tokens=640))
    other = [7] * 100
    driver.together([PREFIX, other], max_new_tokens=1)
    driver.pin(PREFIX, ttl_s=1000.0)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + jump_s)
    for rid, prompt in (("pinned", PREFIX), ("held", other)):
        driver.add(rid, prompt, max_new_tokens=1)
        driver.run()
        assert driver.cached(rid) == 96
        assert 0 <= driver.events[rid][0].admission.queue_s < 1000
    (kept,) = pinned(driver.core).pins
    assert 0 < kept.expires_in_s <= 1000
