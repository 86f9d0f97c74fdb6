"""Prompts of which places are kept: the books of their tokens, and how long the tree has them."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix import Namespace
from runtime.calls import FlushCache, GetPins
from runtime.engine.pins import usage_of
from runtime.protocol import Breakpoint
from tests.runtime.engine.driver import Driver, call, make_core

PAGE = 16
FIVE, HOUR = 300.0, 3600.0
PROMPT = list(range(1000, 1100))
A, B = Namespace("a"), Namespace("b")


class Clock(Driver):
    """A driver with a clock for times to live."""

    def __init__(self, core):
        super().__init__(core)
        self.now = 1000.0
        core.cache.tree._clock = lambda: self.now

    def ask(self, prompt, keep=(), tenant="", namespace=None, **options):
        """The books of a prompt; None: it has none."""
        rid = f"r{len(self.tokens)}"
        space = Namespace(tenant) if namespace is None else namespace
        options = {"max_new_tokens": 1, **options}
        self.add(rid, prompt, breakpoints=list(keep), namespace=space, account=tenant, **options)
        self.run()
        told = [event.usage for event in self.events[rid] if event.usage is not None]
        assert len(told) <= 1
        return told[0] if told else None

    def flood(self, count, start=2000):
        for i in range(count):
            self.add(f"flood{len(self.tokens)}", [start + 7 * i] * 60, max_new_tokens=1)
        self.run()

    def cached(self, prompt, tenant=""):
        return len(self.core.cache.tree.match(array("i", prompt).tobytes(), Namespace(tenant)).pages) * PAGE


@pytest.fixture
def driver(ids_dir):
    return Clock(make_core(ids_dir, pool_tokens=640, pin_budget=0.5))


def figures(told):
    return told.read, told.created, told.input


def test_books_of_a_prompt(driver):
    assert figures(driver.ask(PROMPT, [(40, FIVE)])) == (0, {FIVE: 32}, 68)
    told = driver.ask([*PROMPT[:80], *range(20)], [(40, FIVE), (100, HOUR)])
    assert figures(told) == (80, {HOUR: 16}, 4)
    assert [(place.tokens, place.kept, place.ttl_s, place.reason) for place in told.breakpoints] == [
        (40, 32, FIVE, None),
        (100, 96, HOUR, None),
    ]
    assert figures(driver.ask(PROMPT, [(100, FIVE)])) == (96, {}, 4)
    assert figures(driver.ask(PROMPT[:96], [(96, FIVE)])) == (95, {FIVE: 1}, 0), "the last token is always computed"
    assert driver.ask(PROMPT) is None
    assert driver.ask([5] * 64, [(64, FIVE)], max_new_tokens=0).created == {FIVE: 64}


def test_what_is_not_kept_is_said_and_counts_as_input(driver):
    told = driver.ask(PROMPT, [(10, FIVE), (64, FIVE)])
    assert figures(told) == (0, {FIVE: 64}, 36)
    assert [place.kept for place in told.breakpoints] == [0, 64]
    assert "shorter than a page" in told.breakpoints[0].reason
    told = driver.ask([7] * 400, [(160, FIVE), (400, FIVE)])
    assert figures(told) == (0, {FIVE: 160}, 240)
    assert "budget is 20 pages" in told.breakpoints[1].reason
    assert driver.core.state()["keeps"] == 2
    assert driver.core.state()["keeps_refused"] == 2


def test_nothing_is_kept_without_a_cache(ids_dir):
    driver = Clock(make_core(ids_dir, prefix_cache=False))
    told = driver.ask(PROMPT, [(64, FIVE)])
    assert figures(told) == (0, {}, 100)
    assert told.breakpoints[0].reason == "the prefix cache is off"


def test_a_breakpoint_survives_a_flood_for_its_time_and_goes_after(driver):
    driver.ask(PROMPT, [(96, FIVE)])
    driver.now += FIVE - 1
    driver.flood(40)
    assert driver.cached(PROMPT) == 96
    assert driver.ask(PROMPT) is None, "a use without a place renews it as well"
    driver.now += FIVE - 1
    driver.flood(40)
    assert driver.cached(PROMPT) == 96
    driver.now += 2
    driver.flood(40, 3000)
    assert driver.cached(PROMPT) == 0
    assert figures(driver.ask(PROMPT, [(96, FIVE)])) == (0, {FIVE: 96}, 4)


def test_a_prompt_with_documents_that_reads_it_renews_it_as_well(driver):
    driver.ask(PROMPT, [(96, FIVE)])
    driver.now += FIVE - 1
    reuse = {"strategy": "chunks", "method": "pie", "documents": [[96, 136]]}
    driver.send("behind it", [*PROMPT[:96], *range(40), 7], {"max_new_tokens": 1}, reuse=reuse)
    driver.run()
    driver.now += 2
    driver.flood(40)
    assert driver.cached(PROMPT) == 96


def test_floods_with_breakpoints_of_their_own_take_it_from_nobody_within_its_share(driver):
    driver.ask(PROMPT, [(96, FIVE)], tenant="a")
    driver.now += FIVE - 1
    for i in range(12):
        driver.ask([3000 + i] * 70, [(64, HOUR)], tenant="b")
    assert driver.cached(PROMPT, "a") == 96
    kept = call(driver.core, GetPins()).kept
    assert [(entry.tenant, entry.prefixes, entry.tokens) for entry in kept] == [("a", 1, 96), ("b", 3, 192)]


def test_an_aborted_prompt_keeps_nothing_and_an_answer_that_is_aborted_does(driver):
    driver.add("early", PROMPT, breakpoints=[(96, FIVE)], max_new_tokens=4)
    driver.abort("early")
    assert driver.core.state()["pages_held"] == 0
    driver.add("late", PROMPT, breakpoints=[(96, FIVE)], max_new_tokens=40)
    driver.step()
    driver.abort("late")
    assert driver.core.state()["pages_held"] == 6
    driver.check_idle()


def test_books_of_a_prompt_that_gave_way_while_it_was_computed(ids_dir):
    driver = Clock(make_core(ids_dir, pool_tokens=352, step_tokens=32, pin_budget=1.0))
    for i in range(3):
        driver.add(f"r{i}", [i] * 150, breakpoints=[(150, FIVE)], max_new_tokens=60)
    driver.run()
    assert driver.core.scheduler.num_retracted > 0
    for i in range(3):
        (told,) = [event.usage for event in driver.events[f"r{i}"] if event.usage is not None]
        assert told.read + sum(told.created.values()) + told.input == 150


def test_rolling_breakpoints_have_the_hit_ratio_of_the_longest_prefix(driver):
    """An agent's loop: system prompt and tools for an hour, the last two messages for five minutes."""
    said = [[100 + turn] * (11 + 5 * turn % 23) for turn in range(9)]
    history, lengths = PROMPT[:70], [70]
    for turn in said:
        keep = [(70, HOUR), *((length, FIVE) for length in lengths[-2:])]
        told = driver.ask(history, keep)
        assert told.read == (lengths[-2] // PAGE * PAGE if len(lengths) > 1 else 0), "all that was sent before"
        assert told.read + sum(told.created.values()) + told.input == len(history)
        history = history + turn
        lengths.append(len(history))
        driver.now += 100
        driver.flood(10, 2000 + 100 * len(lengths))
    assert driver.core.state()["keeps"] == len(lengths) - 1
    assert driver.core.state()["pages_held"] == lengths[-2] // PAGE


@pytest.mark.parametrize("read", [0, 10, 48, 100])
def test_a_token_counts_for_the_longest_time(read):
    places = [
        Breakpoint(32, HOUR, 32),
        Breakpoint(48, FIVE, 48),
        Breakpoint(64, HOUR, 64),
        Breakpoint(80, FIVE, 80),
        Breakpoint(90, HOUR),
    ]
    told = usage_of(100, read, places)
    assert told.created == {
        0: {HOUR: 64, FIVE: 16}, 10: {HOUR: 54, FIVE: 16}, 48: {HOUR: 16, FIVE: 16}, 100: {}
    }[read]  # fmt: skip
    assert told.read + sum(told.created.values()) + told.input == 100


ROOTS = [[i] * 40 + list(range(300 * i, 300 * i + 60)) for i in range(1, 4)]
asks = st.tuples(
    st.sampled_from(["a", "b"]),
    st.sampled_from(ROOTS),
    st.integers(1, 100),
    st.lists(st.tuples(st.integers(0, 120), st.sampled_from([FIVE, HOUR])), max_size=4),
    st.sampled_from([0.0, 200.0, 2000.0]),
    st.booleans(),
)


@pytest.fixture(scope="module")
def small(ids_dir):
    return Clock(make_core(ids_dir, pool_tokens=256, pin_budget=0.5))


@settings(max_examples=20, deadline=None)
@given(plan=st.lists(asks, min_size=1, max_size=7))
def test_books_agree_with_the_tree(small, plan):
    driver = small
    call(driver.core, FlushCache(pins=True))
    tree = driver.core.cache.tree
    for tenant, root, length, places, seconds, flood in plan:
        prompt = root[:length] + [7] * 20
        places = sorted((min(end, len(prompt)), ttl_s) for end, ttl_s in places)
        driver.now += seconds
        if flood:
            driver.flood(4)
        key = array("i", prompt)
        found = tree.match(key[:-1].tobytes(), Namespace(tenant))
        told = driver.ask(prompt, places, tenant)
        if told is None:
            assert not places
            continue
        assert told.read == len(found.pages) * PAGE + found.partial_rows
        assert told.read + sum(told.created.values()) + told.input == len(prompt)
        assert [(place.tokens, place.ttl_s) for place in told.breakpoints] == places
        end = max((place.kept for place in told.breakpoints), default=0)
        assert sum(told.created.values()) == max(end - told.read, 0)
        for place in told.breakpoints:
            assert (place.reason is None) == (place.kept == place.tokens // PAGE * PAGE > 0)
            held = tree.match(key[: place.kept].tobytes(), Namespace(tenant))
            assert len(held.pages) * PAGE == place.kept
            assert not place.kept or held.node.held_until_s > driver.now
    driver.core.cache.holds.check()
    assert tree.num_pinned_pages == 0
