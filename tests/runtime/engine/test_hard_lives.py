"""Attempts to break the engine of causal models: pins, peers, damaged pages, random lives."""

import random

import pytest
import torch

from radix import Namespace
from runtime.calls import Pause
from runtime.errors import PinRefused
from tests.runtime.engine.driver import Driver, call, make_core
from tests.runtime.engine.test_overlap import VARIANTS
from tests.tiny import VOCAB

STYLES = [variant for variant in VARIANTS if "regex" not in variant]


def prompt_of(seed, count):
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


def test_a_peer_whose_last_chunk_is_one_row_wakes_those_that_wait_for_it(ids_dir):
    """The last prompt row completes the awaited page."""
    shared = prompt_of(1, 64)
    driver = Driver(make_core(ids_dir, page_size=16, chunk_tokens=9))
    driver.add("a", shared, max_new_tokens=100)
    driver.add("b", [*shared, 5, 6, 7], max_new_tokens=2)
    while not driver.tokens["a"]:
        driver.step()
    for _ in range(20):
        driver.step()
    assert "b" in driver.finish, "b waits until a has generated all its tokens"


def test_a_pin_whose_computation_is_refused_is_answered(ids_dir):
    core = make_core(ids_dir, pool_tokens=4096, pin_budget=1.0)
    driver = Driver(core)
    assert core.info.context_length == 512
    answer = driver.pin(prompt_of(3, 600))
    driver.run()
    assert answer is not None or driver.answer(), "the call is never answered"


def test_a_pin_that_needs_one_page_more_than_the_pool_has_ends(ids_dir):
    core = make_core(ids_dir, page_size=16, pool_tokens=160, pin_budget=1.0)
    driver = Driver(core)
    answer = driver.pin(prompt_of(4, 165))
    for _ in range(50):
        driver.step()
    assert answer is not None or driver.answer(), "the call is never answered"


def test_a_pin_without_prefix_cache_is_refused_without_computing(ids_dir):
    core = make_core(ids_dir, prefix_cache=False)
    driver = Driver(core)
    answer = driver.pin(prompt_of(5, 64))
    driver.run()
    assert core.counters["row_layers"] == 0, "the prefix is computed for nothing"
    assert answer.message == "the prefix cache is off"


def test_two_different_pins_at_once_hold_the_budget(ids_dir):
    core = make_core(ids_dir, page_size=16, pool_tokens=320, pin_budget=0.5)
    driver = Driver(core)
    assert driver.pin(prompt_of(7, 112), 1) is None
    assert driver.pin(prompt_of(8, 112), 2) is None
    driver.run()
    replies = {number: driver.answer(number) for number in (1, 2)}
    assert sorted(isinstance(r, PinRefused) for r in replies.values()) == [False, True]


def test_a_pin_of_a_prefix_that_is_computed_now_waits_for_it_while_paused(ids_dir):
    core = make_core(ids_dir, chunk_tokens=16)
    driver = Driver(core)
    tokens = prompt_of(9, 100)
    driver.add("a", tokens, max_new_tokens=3)
    driver.step()
    assert driver.pin(tokens[:64]) is None
    call(core, Pause(True))
    driver.step()
    driver.abort("a")
    call(core, Pause(False))
    driver.run()
    assert len(driver.answer()) == 1


def test_a_request_named_like_a_pin(ids_dir):
    core = make_core(ids_dir)
    driver = Driver(core)
    driver.add("pin 1", prompt_of(11, 40), max_new_tokens=3)
    assert driver.pin(prompt_of(12, 40)) is None
    driver.run()
    assert "pin 1" in driver.finish
    assert driver.answer()


def test_a_failing_step_under_a_pin_answers_it(ids_dir):
    core = make_core(ids_dir)
    driver = Driver(core)
    core.executor.run = lambda batch: 1 / 0
    assert driver.pin(prompt_of(13, 40)) is None
    driver.run()
    assert isinstance(driver.answer(), PinRefused)


def test_grammars_and_peers_mixed_with_aborts(tiny_dir):
    core = make_core(tiny_dir, page_size=4, chunk_tokens=8, pool_tokens=400)
    driver = Driver(core)
    draw = random.Random(3)
    root = prompt_of(14, 60)
    for i in range(60):
        options = {"regex": f"[a-z]{{{1 + i % 4}}}"} if i % 3 == 0 else {}
        driver.add(str(i), [*root[: draw.randrange(1, 61)], i], max_new_tokens=6, **options)
        if draw.random() < 0.4 and core.requests:
            driver.abort(draw.choice(list(core.requests)))
        for _ in range(draw.randrange(3)):
            driver.step()
    driver.run()
    assert set(driver.finish) == {str(i) for i in range(60)}
    assert not core.scheduler.blocked


@pytest.mark.parametrize(("seed", "overlap"), [(0, "on"), (1, "off"), (2, "off"), (3, "on")])
def test_lives(ids_dir, seed, overlap):
    """Everything at once: failing steps, NaN, pins, quotas, prompt log-probabilities, flushes, aborts, retraction."""
    draw = random.Random(seed)
    page = draw.choice([1, 4, 16])
    options = {"overlap": overlap}
    if overlap == "on":
        options["kernels"] = "torch"
    core = make_core(
        ids_dir, page_size=page, chunk_tokens=draw.choice([5, 9, 16]), pool_tokens=320, pin_budget=0.5,
        tenant_quota=128, max_running=draw.choice([3, 16]),
        schedule_policy=draw.choice(["balanced", "lpm", "fcfs", "priority"]), **options,
    )  # fmt: skip
    plain = Driver(make_core(ids_dir, prefix_cache=False))
    driver = Driver(core)
    run = core.executor.run

    def flaky(batch):
        if draw.random() < 0.02:
            raise RuntimeError("no")
        logits = run(batch)
        if draw.random() < 0.02:
            logits = torch.full_like(logits, torch.nan)
        return logits

    core.executor.run = flaky
    roots = [prompt_of(100 + i, 60) for i in range(2)]
    prompts, kinds, styles, calls, answered = {}, {}, {}, 0, 0
    for i in range(120):
        rid = str(i)
        prompt = [*draw.choice(roots)[: draw.randrange(61)], *prompt_of(i, draw.randrange(1, 10))]
        prompts[rid] = prompt
        more = {}
        if draw.random() < 0.2:
            more["prompt_logprobs_from"] = draw.randrange(len(prompt))
            more["logprobs"] = 1
        kinds[rid] = more.get("prompt_logprobs_from")
        styles[rid] = {**draw.choice(STYLES), "seed": i}
        more = styles[rid] | more
        driver.add(
            rid, prompt, max_new_tokens=draw.choice([0, 1, 8, 30]), namespace=Namespace(draw.choice(["x", "y"])),
            priority=draw.randrange(2), **more,
        )  # fmt: skip
        if draw.random() < 0.15:
            calls += 1
            ttl = draw.choice([None, 0.01])
            root = draw.choice(roots)[: draw.randrange(16, 61)]
            space = Namespace(draw.choice(["x", "y"]))
            answered += driver.pin(root, calls, namespace=space, ttl_s=ttl) is not None
        if draw.random() < 0.3 and core.requests:
            driver.abort(draw.choice(list(core.requests)))
        if draw.random() < 0.05:
            driver.flush()
        for _ in range(draw.randrange(4)):
            driver.step()
    driver.run()
    answered += len(driver.replies)
    assert answered == calls
    assert set(driver.finish) == set(prompts)
    good = [rid for rid, finish in driver.finish.items() if finish.type == "length"]
    for rid in good[-25:]:
        plain.add(rid, prompts[rid], max_new_tokens=len(driver.tokens[rid]), **styles[rid])
    plain.run()
    for rid in good[-25:]:
        assert driver.tokens[rid] == plain.tokens[rid]
        if kinds[rid] is not None:
            found = [p.token for e in driver.events[rid] for p in e.prompt_logprobs or []]
            assert found == prompts[rid][kinds[rid] :]


def test_the_last_position_of_the_context(ids_dir):
    core = make_core(ids_dir, page_size=16, pool_tokens=1024)
    driver = Driver(core)
    for i, size in enumerate((511, 512, 510)):
        driver.add(str(i), prompt_of(20, size), max_new_tokens=512 - size)
    driver.run()
    assert [len(driver.tokens[str(i)]) for i in range(3)] == [1, 0, 2]
