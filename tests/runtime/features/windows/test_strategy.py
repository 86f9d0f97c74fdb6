"""Models with windows free the rows behind them: tokens are those of transformers, whatever is freed."""

import random
from array import array
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runtime.engine.driver import Driver, gives, make_core
from tests.runtime.features.drafts.test_exact import run
from tests.tiny import VOCAB, save_tiny

NEW, WINDOW = 6, 20


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def is_greedy(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return partial(gives, model)


def draw_ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, VOCAB) for _ in range(count)]


@pytest.mark.parametrize(("page_size", "kernels"), [(1, "auto"), (4, "auto"), (16, "auto"), (4, "torch")])
def test_random_lives(path, is_greedy, page_size, kernels):
    """Conversations and branches, in a pool that evicts and retracts, with few places for the layers with a window."""
    draw = random.Random(page_size)
    core = make_core(path, page_size=page_size, kernels=kernels, pool_tokens=1280, max_running=4)
    near, driver = core.cache.near, Driver(core)
    assert near.pool.k.shape[0] == 3
    assert near.pool.num_pages < core.cache.pool.num_pages
    roots = [draw_ids(draw, 300) for _ in range(3)]
    prompts, told = {}, [[*root] for root in roots]
    for number in range(36):
        if number % 3 == 2:
            before = told[draw.randrange(len(told))]
            prompt = before[:400] + draw_ids(draw, draw.randrange(1, 12))
        else:
            prompt = draw.choice(roots)[: draw.randrange(1, 300)] + draw_ids(draw, draw.randrange(1, 40))
        rid = f"{number}"
        prompts[rid] = prompt
        driver.add(rid, prompt, max_new_tokens=draw.choice([1, NEW, 3 * NEW]), priority=draw.randrange(2))
        for _ in range(draw.randrange(6)):
            driver.step()
        if draw.random() < 0.1:
            driver.abort(rid)
            del prompts[rid]
        if number % 12 == 11:
            driver.run()
            told += [prompts[each] + driver.tokens[each] for each in [*prompts][-3:]]
    driver.run()
    assert [rid for rid, prompt in prompts.items() if not is_greedy(prompt, driver.tokens[rid])] == []
    state = core.state()
    assert state["cached_tokens"] > 0
    assert state["evicted_tokens"] > 0
    assert state["window_pages_used"] == 0
    driver.flush()
    assert (near.places == -1).all(), "pages that left the tree have no places"


def fill(driver: Driver, draw: random.Random, count: int) -> None:
    """Requests whose ends need all places of the layers with a window."""
    for number in range(count):
        driver.add(f"filler {driver.steps} {number}", draw_ids(draw, 100), max_new_tokens=1)
        driver.run()


def test_a_prefix_is_read_as_far_as_its_last_rows_have_places(path, is_greedy):
    draw = random.Random(5)
    core = make_core(path, page_size=4)
    driver = Driver(core)
    prompt = draw_ids(draw, 200)
    driver.add("first", prompt, max_new_tokens=1)
    driver.run()
    fill(driver, draw, 8)
    for number, (shared, cached) in enumerate([(150, 0), (150, 150), (180, 148), (199, 199)]):
        if number == 1:
            # The rows before the place where two prompts part are kept longer than what a window has passed.
            fill(driver, draw, 1)
        branch = prompt[:shared] + draw_ids(draw, 30)
        driver.add(f"{number}", branch, max_new_tokens=NEW)
        driver.run()
        assert driver.cached(f"{number}") // 4 * 4 == cached // 4 * 4
        assert is_greedy(branch, driver.tokens[f"{number}"])


def test_a_resumed_request_keeps_the_places_of_the_rows_that_it_sees(path, is_greedy):
    """Its own first page needs a place when only pages that a window has passed can give one."""
    draw = random.Random(5)
    core = make_core(path, page_size=4, pool_tokens=1280)
    driver, near, prompt = Driver(core), core.cache.near, draw_ids(draw, 300)
    driver.add("first", prompt, max_new_tokens=1)
    driver.run()
    fill(driver, draw, 1)
    assert not near._free
    pages = [*core.cache.tree.match(array("i", prompt).tobytes()).pages]
    shared = pages.index(next(iter(near._passed))) * 4 + WINDOW - 1  # the next page to lose its place is seen first
    branch = prompt[:shared] + draw_ids(draw, 30)
    driver.add("branch", branch, max_new_tokens=NEW)
    driver.run()
    assert driver.cached("branch") == shared
    assert is_greedy(branch, driver.tokens["branch"])


def test_drafts(path, monkeypatch):
    draw = random.Random(8)
    prompts = [draw_ids(draw, 60) for _ in range(3)]
    plain = run(make_core(path, page_size=4), prompts, monkeypatch)
    for right in (1.0, 0.6):
        core = make_core(path, page_size=4, drafts="auto")
        for _ in range(2):
            assert run(core, prompts, monkeypatch, plain.tokens, right).tokens == plain.tokens


@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_and_held_ends_keep_their_rows(path, pinned):
    draw = random.Random(6)
    driver = Driver(make_core(path, page_size=4, hold_time="0:600"))
    prompt = draw_ids(draw, 129)
    if pinned:
        driver.pin(prompt)
    else:
        driver.add("held", prompt, max_new_tokens=1, hold_s=300.0)
    fill(driver, draw, 40)
    driver.add("again", [*prompt, 5, 6], max_new_tokens=1)
    driver.run()
    assert driver.cached("again") == 128


def test_more_conversations_fit_into_the_same_memory(path, tmp_path):
    """Counts conversations that are read to their ends. The core with a tier keeps the rows of all four layers."""
    draw, found = random.Random(10), []
    prompts = [draw_ids(draw, 400) for _ in range(24)]
    for options in ({}, {"host_memory": 0.0001}):
        core = make_core(path, page_size=4, pool_tokens=None, pool_memory=4096 * 4 * 256 / 2**30, **options)
        driver = Driver(core)
        for again in range(2):
            for number, prompt in enumerate(prompts if not again else prompts[::-1]):
                driver.add(f"{again} {number}", prompt, max_new_tokens=1)
                driver.run()
        found.append(sum(driver.cached(f"1 {number}") == 399 for number in range(24)))
        memory = [pool.k.nbytes for pool in (core.executor.pool, core.cache.near and core.cache.near.pool) if pool]
        assert sum(memory) <= 1.1 * 4096 * 4 * 128
    assert found[0] >= 1.9 * found[1] > 0


def test_requests_wait_for_places(path):
    draw = random.Random(7)
    core = make_core(path, page_size=4, max_running=16)
    driver = Driver(core)
    most = core.cache.near.pool.num_pages
    for number in range(12):
        driver.add(f"{number}", draw_ids(draw, 300), max_new_tokens=NEW)
    running = 0
    while core.requests:
        driver.step()
        running = max(running, len(core.scheduler.running))
    assert 0 < running < 12
    assert len(driver.finish) == 12
    assert most < 12 * (300 + NEW) // 4


def test_no_request_waits_for_rows_that_it_could_not_read(path):
    """A window has passed all that the two requests share, and other pages have got the places."""
    draw = random.Random(5)
    core = make_core(path, page_size=4, pool_tokens=1280, step_tokens=32)
    driver, long = Driver(core), draw_ids(draw, 300)
    for number in range(20):
        driver.add(f"{number}", draw_ids(draw, 20), max_new_tokens=1)
        driver.run()
    driver.add("long", long, max_new_tokens=1)
    for _ in range(4):
        driver.step()
    driver.add("short", [*long[:60], 5, 6], max_new_tokens=1)
    driver.run()
    assert [*driver.finish][-2:] == ["short", "long"]


def test_with_tiers_all_rows_stay(path, tmp_path):
    core = make_core(path, disk_cache=tmp_path)
    assert core.cache.near is None
    assert core.executor.has_windows
    core.close()


def test_a_miss_names_the_nearest_place_that_can_be_read(path):
    draw = random.Random(9)
    driver = Driver(make_core(path, page_size=4))
    prompt = draw_ids(draw, 200)
    driver.add("first", prompt, max_new_tokens=1)
    driver.run()
    fill(driver, draw, 8)
    driver.send("again", prompt[:150], {"max_new_tokens": 1}, explain=True)
    driver.run()
    (lookup,) = [event.lookup for event in driver.events["again"] if event.lookup is not None]
    assert (lookup.found, lookup.point) == (149, 0)
