"""Steps ahead whose tokens are chosen after those before are booked: tokens are as in step, and dropped cleanly."""

import json
import random
from typing import Any

import pytest
import torch

from runtime.errors import InvalidRequest
from runtime.features.grammars.grammar import Grammar
from runtime.sampling.sampler import Sampled, Sampler
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.engine.test_overlap import VARIANTS, Overlapping

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}}})
# Many tokens of the vocabulary have an `a` and go on otherwise: the grammar refuses them.
LAZY: dict[str, Any] = {"grammar": "start: /a[b-d]+./", "lazy": {"triggers": ["a"]}, "temperature": 1.0}
NEEDING: list[dict[str, Any]] = [
    {"json_schema": SCHEMA, "ignore_eos": False},
    {"json_schema": SCHEMA, "temperature": 1.0, "top_p": 0.9, "logprobs": 2, "max_new_tokens": 30},
    {"regex": "[0-9]{3,9}", "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"regex": "oak|elm|ash", "temperature": 1.0, "logprobs": 0},
    {**LAZY, "logprobs": 1, "max_new_tokens": 40},
    {**LAZY, "presence_penalty": 0.7, "max_new_tokens": 40},
]
FEW = {"temperature": 1.0, "allowed_token_ids": list(range(100, 112)), "stop_token_ids": [100, 101]}
OTHERS: list[dict[str, Any]] = [*VARIANTS[1:-1], FEW, {**FEW, "min_new_tokens": 3}]


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(8)
    return [draw.choices(range(3, 49152), k=draw.randrange(4, 20)) for _ in NEEDING + OTHERS]


@pytest.fixture
def refusals(monkeypatch):
    """The tokens that were drawn again."""
    drawn, draw_again = [], Sampler.draw_again

    def noted(sampler, logits, choice, *rest):
        drawn.append(choice.barred[-1])
        return draw_again(sampler, logits, choice, *rest)

    monkeypatch.setattr(Sampler, "draw_again", noted)
    return drawn


def answers(driver: Driver, prompts: list[list[int]], styles: list[dict[str, Any]]) -> tuple[list[Any], list[float]]:
    """Run all requests, some of which come later; tokens and end of each, and all log-probabilities."""
    for i, (prompt, style) in enumerate(zip(prompts, styles, strict=True)):
        driver.add(str(i), prompt, **{"max_new_tokens": 14, "seed": 3, **style})
        for _ in range(i % 3):
            driver.step()
    driver.run()
    found, measured = [], []
    for rid, tokens in driver.tokens.items():
        listed = [one for event in driver.events[rid] for one in event.logprobs or []]
        found.append((tokens, driver.finish[rid], [(one.token, [token for token, _ in one.top]) for one in listed]))
        measured += [one.logprob for one in listed]
    return found, measured


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_grammars_and_their_neighbours_get_the_tokens_that_they_get_in_step(tiny_dir, prompts, refusals, kernels):
    styles = [*NEEDING, *OTHERS]
    plain, measured = answers(Driver(make_core(tiny_dir, kernels=kernels)), prompts, styles)
    refused, refusals[:] = sorted(refusals), []
    driver = Overlapping(tiny_dir, kernels=kernels)
    assert answers(driver, prompts, styles) == (plain, pytest.approx(measured, abs=1e-3))
    assert sorted(refusals) == refused
    assert len(refused) > 3
    assert max(driver.ahead) >= len(NEEDING)
    assert driver.core.counters["failed_steps"] == 0


def test_bad_words_are_those_of_the_output_so_far(tiny_dir, prompts):
    (free,) = Driver(make_core(tiny_dir)).together(prompts[:1], max_new_tokens=12)
    found = []
    for overlap in ("off", "on"):
        driver = Driver(make_core(tiny_dir, overlap=overlap))
        sampling = {"max_new_tokens": 12, "bad_words": ["x"]}
        driver.send("a", prompts[0], sampling, bad_words=[free[5:7], free[8:10]])
        driver.run()
        found.append(driver.tokens["a"])
    assert driver.core.counters["overlapped_steps"] > 5
    assert found[0] == found[1]
    assert (found[0][:6], found[0][6] != free[6]) == (free[:6], True)


def test_a_step_runs_before_the_tokens_ahead_of_it_are_read_and_its_own_are_chosen_after(tiny_dir, monkeypatch):
    core = make_core(tiny_dir, overlap="on", kernels="torch")
    log: list[str] = []

    def noting(what, call):
        return lambda *args: log.append(what) or call(*args)

    monkeypatch.setattr(core.executor, "run", noting("run", core.executor.run))
    monkeypatch.setattr(core.decoding, "choose", noting("choose", core.decoding.choose))
    monkeypatch.setattr(Sampled, "read", noting("read", Sampled.read))
    driver = Driver(core)
    driver.add("digits", [1, 2, 3], regex="[0-9]{20}", max_new_tokens=4)
    driver.add("plain", [4, 5, 6], max_new_tokens=6)
    driver.run()
    late, early = ["run", "read", "choose"], ["run", "choose", "read"]
    assert log == ["run", "choose", *late, *late, *late, *early, *early, "read"], "the plain one is alone at the end"


def test_choosing_that_fails_ahead_is_repeated_in_step(tiny_dir, prompts, monkeypatch):
    """No grammar has advanced by then, and penalties count no token twice."""
    styles = [*NEEDING, *OTHERS]
    plain, _ = answers(Driver(make_core(tiny_dir, kernels="torch")), prompts, styles)
    driver, random_ = Overlapping(tiny_dir), random.Random(4)
    core = driver.core
    choose_ahead, choose = core._choose_ahead, core.decoding.choose
    at: list[bool] = []

    def ahead(flight):
        at.append(True)
        try:
            return choose_ahead(flight)
        finally:
            at.pop()

    def flaky(*args):
        sampled = choose(*args)
        if at and random_.random() < 0.4:
            raise torch.OutOfMemoryError("no memory")  # with the penalties counted
        return sampled

    monkeypatch.setattr(core, "_choose_ahead", ahead)
    monkeypatch.setattr(core.decoding, "choose", flaky)
    assert answers(driver, prompts, styles)[0] == plain
    assert core.counters["failed_steps"] > 3
    assert core.counters["failed_requests"] == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_a_grammar_ends_leaves_no_row_behind_its_end(tiny_dir, prompts, page_size):
    """A step with a row of the ended request is in flight; what it wrote lies under no key of the tree."""
    driver = Overlapping(tiny_dir, page_size=page_size)
    driver.add("ends", prompts[0], regex="[0-9]{4,6}x?", max_new_tokens=14)
    driver.add("goes on", prompts[1], regex="[a-z]{40}", max_new_tokens=14)
    driver.run()
    tokens = driver.tokens["ends"]
    assert (driver.finish["ends"].type, len(tokens) < 14) == ("stop", True)
    assert 2 in driver.ahead[driver.ahead.index(2) :]
    plain = Driver(make_core(tiny_dir, kernels="torch"))
    whole = [*prompts[0], *tokens, 7, 8, 9, 10, 11, 12]
    driver.add("again", whole, max_new_tokens=4)
    driver.run()
    assert driver.cached("again") == (len(prompts[0]) + len(tokens) - 1) // page_size * page_size
    assert driver.tokens["again"] == plain.together([whole], max_new_tokens=4)[0]


def test_a_grammar_whose_request_is_aborted_with_a_step_in_flight(tiny_dir, prompts):
    plain = Driver(make_core(tiny_dir, kernels="torch"))
    driver = Overlapping(tiny_dir, page_size=2)
    for one in (plain, driver):
        for i in range(3):
            one.add(str(i), prompts[i], regex="[a-z0-9]{30}", max_new_tokens=12, temperature=1.0, seed=i)
    plain.run()
    driver.wait_for_grammars()
    while driver.core._in_flight is None or len(driver.tokens["1"]) < 4:
        driver.step()
    driver.abort("1")
    driver.run()
    assert driver.tokens["1"] == plain.tokens["1"][: len(driver.tokens["1"])]
    assert (driver.tokens["0"], driver.tokens["2"]) == (plain.tokens["0"], plain.tokens["2"])
    assert driver.ahead[-1] == 2


def test_a_dead_end_of_a_grammar_ends_its_request_alone(tiny_dir, prompts, monkeypatch):
    """`allowed` fails when the step behind it is in flight."""
    driver = Overlapping(tiny_dir)
    for i, rid in enumerate(("fails", "goes on")):
        driver.add(rid, prompts[i], regex="[a-z]{99}", max_new_tokens=12)
    allowed = Grammar.allowed

    def fail(grammar):
        if len(driver.tokens["fails"]) == 5 and grammar is driver.requests["fails"].sampler.grammar:
            raise InvalidRequest("the grammar cannot be followed further")
        return allowed(grammar)

    monkeypatch.setattr(Grammar, "allowed", fail)
    driver.run()
    assert (driver.finish["fails"].type, len(driver.tokens["fails"])) == ("error", 6)
    assert len(driver.tokens["goes on"]) == 12
