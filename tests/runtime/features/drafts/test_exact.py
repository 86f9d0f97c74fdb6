"""Output with drafts is that without, whatever the drafts are: right, wrong, or in between."""

import json
import random
from array import array
from collections import Counter

import pytest
import torch

from radix import Namespace
from runtime.calls import EraseTenant, FlushCache
from runtime.execution.native.library import load_best
from runtime.features.drafts.drafter import LONGEST
from runtime.features.drafts.pace import Pace
from runtime.features.drafts.part import Drafts
from runtime.params import SamplingParams
from runtime.sampling.filters import filter_probs
from runtime.sampling.sampler import Sampler
from tests.runtime.engine.driver import Driver, call, greedy, make_core
from tests.runtime.requests import make_request

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer"}},
                     "required": ["a", "b"], "additionalProperties": False})  # fmt: skip
OPTIONS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "filtered": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {5: 4.0, 9: 3.0}, "temperature": 0.5, "seed": 1},
    "logprobs": {"logprobs": 3},
    "grammar": {"json_schema": SCHEMA, "ignore_eos": False},
    "seeded grammar": {"json_schema": SCHEMA, "temperature": 1.0, "seed": 5, "ignore_eos": False},
    "lazy": {"grammar": 'start: "e" /[0-9]{3}/ "e"', "lazy": {"triggers": ["e"]}, "ignore_eos": False},
    "seeded lazy": {"grammar": "start: /a[b-d]+./", "lazy": {"triggers": ["a"]}, "temperature": 1.0, "seed": 2},
}


class Oracle:
    """A drafter's `propose` that knows the output, and says something else with some probability."""

    def __init__(self, driver, known, right):
        self.driver, self.known, self.right, self.draw = driver, known, right, random.Random(1)

    def __call__(self, requests, room, beside):
        found = {}
        for request in requests:
            done = request.num_output
            coming = self.known[request.rid][done : done + min(self.draw.randint(1, LONGEST), room)]
            coming = coming[: request.max_length - len(request.tokens) - 1]
            draft = [t if self.draw.random() < self.right else self.draw.randrange(100) for t in coming]
            room -= len(draft)
            if draft:
                found[request] = array("i", draft)
        return found


class CheapRows(Pace):
    """A pace at which a row costs a hundredth of a step."""

    def seconds(self, requests, most, beside=0):
        return [1 + 0.01 * rows for rows in range(most + 1)]

    def due(self, requests, gain):
        return False


def run(core, prompts, monkeypatch, known=None, right=1.0, **options):
    driver = Driver(core)
    if known is not None:
        monkeypatch.setattr(core.part(Drafts).drafter, "propose", Oracle(driver, known, right))
    for i, prompt in enumerate(prompts):
        driver.add(str(i), prompt, max_new_tokens=16 + i, **options)
    driver.run()
    return driver


def logprobs_of(driver):
    return [one for rid in sorted(driver.events) for event in driver.events[rid] for one in event.logprobs or []]


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(4)
    root = [draw.randrange(49152) for _ in range(40)]
    return [root[: 10 * i] + [draw.randrange(49152) for _ in range(9)] for i in range(4)]


@pytest.mark.parametrize(("kind", "page_size"), [("greedy", 1), ("greedy", 4), *((kind, 16) for kind in OPTIONS)])
def test_tokens_are_those_of_single_steps(tiny_dir, monkeypatch, prompts, kind, page_size):
    options = {"page_size": page_size, "pool_tokens": 2048}
    plain = run(make_core(tiny_dir, **options), prompts, monkeypatch, **OPTIONS[kind])
    assert not any(isinstance(part, Drafts) for part in plain.core.parts)
    core = make_core(tiny_dir, drafts="auto", **options)
    for right in (1.0, 0.6):
        Driver(core).flush()
        before = Counter(core.counters)
        for _ in range(2 if kind == "greedy" else 1):  # again from the cache, which refused rows have not reached
            drafted = run(core, prompts, monkeypatch, plain.tokens, right, **OPTIONS[kind])
            assert drafted.tokens == plain.tokens
            assert {rid: end.type for rid, end in drafted.finish.items()} == {
                rid: end.type for rid, end in plain.finish.items()
            }
        counted = Counter(core.counters) - before
        if not {"json_schema", "grammar"} & OPTIONS[kind].keys():  # whose requests begin when their grammar is ready
            assert counted["steps"] < plain.core.counters["steps"] * (2 if kind == "greedy" else 1)
        assert counted["accepted_tokens"] > (0.9 * counted["drafted_tokens"] if right == 1 else 0)
        found, expected = logprobs_of(drafted), logprobs_of(plain)
        assert [(one.token, [t for t, _ in one.top]) for one in found] == [
            (one.token, [t for t, _ in one.top]) for one in expected
        ]
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert (kind == "logprobs") == bool(expected)


def test_in_bfloat16_rows_of_a_draft_get_the_bits_of_single_steps(tiny_dir, monkeypatch, prompts):
    library = load_best()
    if library is None or not library.multiplies_pairs:
        pytest.skip("only pairs of bfloat16 are summed in one order")
    options = {"page_size": 16, "pool_tokens": 2048, "dtype": "bfloat16"}
    plain = run(make_core(tiny_dir, **options), prompts, monkeypatch, logprobs=3)
    core = make_core(tiny_dir, drafts="auto", **options)
    for right in (1.0, 0.6):
        drafted = run(core, prompts, monkeypatch, plain.tokens, right, logprobs=3)
        assert drafted.tokens == plain.tokens
        assert logprobs_of(drafted) == logprobs_of(plain)
    assert 0 < core.counters["accepted_tokens"] < core.counters["drafted_tokens"]


def test_a_draft_ends_where_a_stop_token_does(tiny_dir, monkeypatch, prompts):
    plain = run(make_core(tiny_dir), prompts[:1], monkeypatch)
    output = plain.tokens["0"]
    stop = next(t for i, t in enumerate(output) if i > 5 and t not in output[:i])
    for options in ({"stop_token_ids": [stop]}, {"stop_token_ids": [stop], "min_new_tokens": 14}):
        expected = run(make_core(tiny_dir), prompts[:1], monkeypatch, **options)
        core = make_core(tiny_dir, drafts="auto")
        drafted = run(core, prompts[:1], monkeypatch, plain.tokens, **options)
        assert drafted.tokens == expected.tokens
        assert drafted.finish["0"] == expected.finish["0"]
        assert core.counters["generation_tokens"] == len(drafted.tokens["0"])


def test_what_is_found_is_right(tiny_dir, monkeypatch, prompts):
    """An answer that was given before comes again from the tree, in few steps, where rows cost little."""
    core = make_core(tiny_dir, drafts="auto", pool_tokens=2048)
    monkeypatch.setattr(core.part(Drafts).drafter, "_pace", CheapRows())
    driver = Driver(core)
    first = driver.together(prompts, max_new_tokens=64)
    before, steps = dict(core.counters), driver.steps
    assert driver.together(prompts, max_new_tokens=64) == first
    assert core.counters["accepted_tokens"] - before["accepted_tokens"] > 64
    assert driver.steps - steps < steps / 2
    events = [event for events in driver.events.values() for event in events]
    assert sum(event.accepted for event in events) == core.counters["accepted_tokens"]
    assert sum(event.drafted for event in events) == core.counters["drafted_tokens"]
    assert 0 < core.counters["drafts"] <= core.counters["drafted_tokens"]


@pytest.mark.parametrize("pool_tokens", [160, 72])
def test_drafts_take_no_page_that_another_request_needs(tiny_dir, monkeypatch, prompts, reference_of, pool_tokens):
    core = make_core(tiny_dir, drafts="auto", pool_tokens=pool_tokens, page_size=4)
    known = {str(i): greedy(reference_of, prompt, 16 + i) for i, prompt in enumerate(prompts)}
    driver = run(core, prompts, monkeypatch, known, 0.8)
    assert driver.tokens == known
    assert core.scheduler.num_retracted > 0 or pool_tokens > 100


@pytest.fixture(scope="module")
def reference_of(tiny_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()


def test_steps_that_carry_prompts_have_drafts_within_their_room(tiny_dir, monkeypatch, prompts):
    draw = random.Random(8)
    late = [draw.randrange(49152) for _ in range(150)]

    def run_both(core, known=None):
        driver, steps = Driver(core), []
        if known is not None:
            monkeypatch.setattr(core.part(Drafts).drafter, "propose", Oracle(driver, known, 0.8))
            schedule, compute = core.scheduler.schedule, core.executor.run
            monkeypatch.setattr(core.scheduler, "schedule", lambda: steps.append(schedule()) or steps[-1])
            monkeypatch.setattr(core.executor, "run", lambda batch: rows.append(len(batch.tokens)) or compute(batch))
        rows = []
        driver.add("first", prompts[0], max_new_tokens=40, logprobs=2)
        for _ in range(3):
            driver.step()
        driver.add("late", late, max_new_tokens=4)
        driver.run()
        return driver, [(len(s), any(i.draft for i in s), any(i.count > 9 for i in s)) for s in steps], rows

    options = {"step_tokens": 24, "chunk_tokens": 16}
    plain, _, _ = run_both(make_core(tiny_dir, **options))
    drafted, steps, rows = run_both(make_core(tiny_dir, drafts="auto", **options), plain.tokens)
    assert drafted.tokens == plain.tokens
    assert max(rows) <= 24
    assert drafted.core.counters["accepted_tokens"] > 10
    assert any(number == 2 and has_draft and prefills for number, has_draft, prefills in steps)


def test_steps_that_fail_are_run_again_without_the_draft(tiny_dir, monkeypatch, prompts):
    plain = run(make_core(tiny_dir), prompts[:2], monkeypatch)
    core = make_core(tiny_dir, drafts="auto")
    compute, failed = core.executor.run, []

    def fail(batch):
        if len(batch.tokens) > 6 and len(failed) < 5 and core.counters["steps"] > 2:
            failed.append(len(batch.tokens))
            raise RuntimeError("no luck")
        return compute(batch)

    monkeypatch.setattr(core.executor, "run", fail)
    assert run(core, prompts[:2], monkeypatch, plain.tokens, 0.9).tokens == plain.tokens
    assert failed


@pytest.mark.parametrize(
    ("store", "asked", "is_known"),
    [(True, None, True), (False, None, False), (True, FlushCache(), False), (True, EraseTenant(""), False)],
)
def test_nothing_is_drafted_from_outputs_that_may_not_be_kept(ids_dir, store, asked, is_known):
    driver = Driver(make_core(ids_dir, drafts="auto", overlap="off"))
    driver.add("a", [5, 6, 7, 8], max_new_tokens=4, store=store)
    driver.run()
    if asked is not None:
        call(driver.core, asked)
    found, _ = driver.core.part(Drafts).drafter._recent.find(Namespace(), array("i", [7, 8]), 4)
    assert found.tolist() == (driver.tokens["a"] if is_known else [])


def test_drawn_tokens_have_the_distribution_of_single_steps():
    """Two rows, the second behind a drafted token: what is emitted follows the model's own probabilities."""
    vocab, trials = 6, 4000
    sampler = Sampler(vocab, torch.device("cpu"))
    sampler._random.seed(11)
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=1.0, top_k=5)
    request = make_request([1], sampling=params)
    draft = int(logits[0].argmax())
    rows, expected = logits.repeat(trials, 1), [None, draft] * trials
    tokens = torch.tensor(sampler.sample(rows, [request] * len(rows), 0, expected).read()).view(trials, 2)
    first = torch.bincount(tokens[:, 0], minlength=vocab) / trials
    second = torch.bincount(tokens[tokens[:, 0] == draft, 1], minlength=vocab).double()
    total = second.sum().item()
    assert first.tolist() == pytest.approx(filter_probs(logits[0].softmax(0), params).tolist(), abs=2 / trials**0.5)
    assert (second / total).tolist() == pytest.approx(
        filter_probs(logits[1].softmax(0), params).tolist(), abs=2 / total**0.5
    )
