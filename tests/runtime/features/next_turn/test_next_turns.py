"""The next turns of conversations: computed in slices while nothing is live, and counted apart."""

from array import array
from itertools import pairwise

import pytest

from radix import Namespace
from runtime.calls import AddPin, ComputeNextTurn, EraseTenant, FlushCache, Pause
from runtime.features.next_turn.next_turns import SLICE
from tests.runtime.engine.driver import Driver, call, make_core
from tests.tiny import save_tiny

PAGE = 16
HISTORY = [*range(1000, 1450)]
A = Namespace("a")


class Idle(Driver):
    def next_turn(self, tokens=HISTORY, space=A, **options):
        assert call(self.core, ComputeNextTurn(array("i", tokens).tobytes(), space, space.tenant, **options)) is None

    def found(self, tokens=HISTORY, space=A):
        return len(self.core.cache.tree.match(array("i", tokens).tobytes(), space).pages) * PAGE

    def ask(self, rid, prompt, count=4, **options):
        self.add(rid, prompt, max_new_tokens=count, namespace=A, account="a", **options)
        self.run()
        return self.tokens[rid]


def open_driver(ids_dir, most=1000, **options):
    return Idle(make_core(ids_dir, next_turn_tokens=most, **options))


@pytest.fixture
def driver(ids_dir):
    return open_driver(ids_dir)


@pytest.fixture(scope="module")
def gemma_dir(tmp_path_factory):
    return save_tiny("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.mark.parametrize("model", ["ids_dir", "gemma_dir"])
def test_the_next_turn_is_computed_in_slices_and_counted_apart(request, model):
    path = request.getfixturevalue(model)
    driver = open_driver(path)
    driver.ask("first", HISTORY[:100])
    before = driver.core.state()
    driver.next_turn()
    steps = [driver.found()]
    while driver.core.busy:
        driver.step()
        steps.append(driver.found())
    whole = len(HISTORY) // PAGE * PAGE
    assert steps[-1] == steps[-2] == whole
    assert max(later - earlier for earlier, later in pairwise(steps)) <= SLICE
    after = driver.core.state()
    assert after["next_turn_tokens"] == whole - 96
    counted = ("requests", "prompt_tokens", "queries", "hits", "cached_tokens", "prefill_tokens", "generation_tokens")
    assert {name: after[name] for name in counted} == {name: before[name] for name in counted}
    assert after.histograms["reuse_gap_s"] == before.histograms["reuse_gap_s"], "it is no use of the cache"
    driver.check_idle()
    # The same tokens come with and without it.
    asked = [*HISTORY, 7, 8, 9]
    warm = driver.ask("warm", asked, 12)
    assert driver.cached("warm") == whole
    assert warm == Idle(make_core(path)).ask("cold", asked, 12)


def test_a_turn_is_computed_up_to_a_bound_and_only_if_it_pays(ids_dir, driver):
    driver.next_turn(HISTORY[: 2 * PAGE - 1])
    driver.run()
    assert driver.found() == 0, "no more than a page is missing"
    driver = open_driver(ids_dir, 200)
    driver.next_turn()
    driver.run()
    assert driver.found() == 192
    driver.next_turn([*HISTORY[:192], *range(40)])
    driver.run()
    assert driver.core.state()["next_turn_tokens"] == 192 + 32


def test_requests_come_first(driver):
    driver.next_turn()
    driver.add("other", range(2000, 2010), max_new_tokens=20)
    while driver.core.requests:
        driver.step()
        assert driver.found() == 0 or not driver.core.requests
    driver.step()
    assert driver.found() > 0
    # A request that arrives between two slices is computed in the next step.
    driver.add("late", range(3000, 3010), max_new_tokens=1)
    driver.step()
    assert "late" in driver.finish
    driver.run()
    assert driver.found() == len(HISTORY) // PAGE * PAGE


def test_a_pause_an_erasure_and_a_flush_stop_it(driver):
    driver.next_turn()
    driver.step()
    call(driver.core, Pause(True))
    assert not driver.core.busy
    driver.step()
    call(driver.core, Pause(False))
    assert driver.found() < len(HISTORY) - SLICE
    call(driver.core, EraseTenant("a"))
    driver.run()
    assert driver.found() == 0
    driver.next_turn()
    call(driver.core, FlushCache())
    driver.run()
    assert driver.found() == 0


def test_a_quota_is_not_exceeded(ids_dir):
    driver = open_driver(ids_dir, tenant_quota=20)
    driver.next_turn()
    driver.run()
    assert 0 < driver.found() <= 20 * PAGE


def test_pins_stay_and_what_cannot_be_served_is_dropped(ids_dir):
    driver, other = open_driver(ids_dir, pool_tokens=640, pin_budget=1.0), [*range(400)]
    call(driver.core, AddPin(array("i", range(2000, 2480)).tobytes()))
    for tokens in (other, [10**6] * 100, [5] * 700):
        driver.next_turn(tokens)
    driver.next_turn(other, Namespace(adapter="unloaded"))
    driver.run()
    assert SLICE - PAGE <= driver.found(other) <= 640 - 480
    state = driver.core.state()
    assert (state["pins"], state["pins_broken"], state["failed_requests"]) == (1, 0, 0)


def test_it_is_held_as_its_conversation_is(ids_dir):
    driver = open_driver(ids_dir, hold_time="0:60")
    driver.next_turn(hold_s=50.0)
    driver.run()
    assert driver.core.state()["pages_held"] == len(HISTORY) // PAGE


def test_without_the_option_or_a_cache_there_is_no_such_call(ids_dir):
    for options in ({"next_turn_tokens": 0}, {"next_turn_tokens": 9, "prefix_cache": False}):
        with pytest.raises(Exception, match="does not answer ComputeNextTurn"):
            call(make_core(ids_dir, **options), ComputeNextTurn(b""))
