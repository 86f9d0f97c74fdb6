"""Greedy output in float32 is token-identical to transformers, whatever the cache, the chunks and the batch do."""

import copy
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runtime.engine.driver import Driver, gives, greedy, make_core
from tests.runtime.engine.prompts import all_prompts
from tests.tiny import VOCAB

NEW = 8


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return all_prompts(tokenizer)


@pytest.fixture(scope="module")
def served(default_model_dir, prompts):
    """A driver that has answered all prompts, cold."""
    driver = Driver(make_core(default_model_dir, step_tokens=1 << 20, overlap="off"))
    driver.together(prompts, max_new_tokens=NEW)
    return driver


@pytest.fixture(scope="module")
def expected(served, reference, prompts):
    """transformers' tokens: one forward pass shows whether a guess is them, where to generate takes one a token."""
    pairs = zip(prompts, [*served.tokens.values()], strict=True)
    return [guess if gives(reference, prompt, guess) else greedy(reference, prompt, NEW) for prompt, guess in pairs]


def test_there_are_enough_real_prompts(prompts):
    assert len(prompts) >= 20
    assert max(map(len, prompts)) > 500


def test_cache_off(default_model_dir, prompts, expected):
    driver = Driver(make_core(default_model_dir, prefix_cache=False))
    assert driver.together(prompts[::4], max_new_tokens=NEW) == expected[::4]
    assert driver.core.state()["cached_tokens"] == 0
    assert {len(tokens) for tokens in expected} == {NEW}


@pytest.mark.parametrize("options", [{}, {"page_size": 1, "chunk_tokens": 64, "overlap": "on"}])
def test_cold_warm_and_flushed(default_model_dir, prompts, served, expected, options):
    driver = served
    if options:
        driver = Driver(make_core(default_model_dir, step_tokens=1 << 20, **options))
        driver.together(prompts, max_new_tokens=NEW)
    core, page_size = driver.core, driver.core.cache.page_size
    assert [*driver.tokens.values()] == expected
    assert core.state()["cached_tokens"] > 0, "prompts with a common beginning share it within one batch"
    assert driver.together(prompts, max_new_tokens=NEW) == expected
    for i, prompt in enumerate(prompts):
        kept = (len(prompt) + NEW - 1) // page_size * page_size
        if kept >= len(prompt) - 1:
            cached = driver.cached(f"r{len(prompts) + i}")
            assert cached == len(prompt) - 1, "a warm prompt is reused to the token"
    driver.flush()
    assert core.state()["pages_free"] == core.state()["pages_total"]
    assert driver.together(prompts[:3], max_new_tokens=NEW) == expected[:3]


def test_evicting_retracting_and_flushed_midway(default_model_dir, prompts, expected):
    """A pool that holds the longest prompt and little else, staggered arrivals, a flush in between.

    Pages of two tokens, so that decoding outgrows what admission keeps free for it.
    """
    prompts, expected = prompts[1::2], expected[1::2]
    core = make_core(default_model_dir, pool_tokens=max(map(len, prompts)) + NEW + 8, page_size=2)
    driver = Driver(core)
    order = random.Random(1).sample(range(len(prompts)), len(prompts))

    def between(step: int) -> None:
        if step % 2 == 0 and order:
            i = order.pop()
            driver.add(str(i), prompts[i], max_new_tokens=NEW)
        if step == 12:
            driver.flush()

    between(0)
    while order or core.busy:
        driver.run(between)
        between(0)
    for i, tokens in enumerate(expected):
        assert driver.tokens[str(i)] == tokens
    state = core.state()
    assert state["evicted_tokens"] > 0
    assert state["retracted_requests"] > 0


def test_bfloat16_logits_are_close(default_model_dir, reference, prompts):
    """Against float32: each prompt's logits within 10 % of their spread, all in all no worse than transformers' own."""
    core = make_core(default_model_dir, dtype="bfloat16")
    half = copy.deepcopy(reference).to(torch.bfloat16)
    ours, theirs = [], []
    for prompt in prompts[1::6]:
        seen = {}
        run = core.executor.run
        core.executor.run = lambda batch, run=run, seen=seen: seen.update(logits=run(batch)) or seen["logits"]
        Driver(core).together([prompt], max_new_tokens=1)
        core.executor.run = run
        with torch.inference_mode():
            wanted, other = (
                m(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1].float() for m in (reference, half)
            )
        ours.append(_distance(seen["logits"][-1], wanted))
        theirs.append(_distance(other, wanted))
    assert max(ours) < 0.10
    assert sum(ours) < 1.1 * sum(theirs)


def _distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Error over spread; a constant on all logits changes nothing."""
    got, wanted = got - got.mean(), wanted - wanted.mean()
    return float((got - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module")
def tiny_prompts():
    draw = random.Random(7)
    root = [draw.randrange(VOCAB) for _ in range(40)]
    return [
        root[: draw.randrange(1, 41)] + [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 30))] for _ in range(8)
    ]


@pytest.mark.parametrize(
    ("chunk", "page_size", "prefix_cache"),
    [(1, 8, True), (7, 16, True), (7, 1, False), (64, 1, True), (1 << 20, 8, False)],
)
def test_every_architecture(any_tiny_dir, tiny_prompts, tiny_expected, chunk, page_size, prefix_cache):
    core = make_core(any_tiny_dir, page_size=page_size, chunk_tokens=chunk, prefix_cache=prefix_cache, pool_tokens=1024)
    driver = Driver(core)
    for i, prompt in enumerate(tiny_prompts):
        driver.add(str(i), prompt, max_new_tokens=8)
        for _ in range(i % 3):
            driver.step()
    driver.run()
    assert [driver.tokens[str(i)] for i in range(len(tiny_prompts))] == tiny_expected
    assert driver.together(tiny_prompts, max_new_tokens=8) == tiny_expected


@pytest.fixture(scope="module")
def tiny_expected(any_tiny_dir, tiny_prompts):
    model = AutoModelForCausalLM.from_pretrained(any_tiny_dir, dtype=torch.float32).eval()
    expected = [greedy(model, prompt, 8) for prompt in tiny_prompts]
    assert len({tuple(tokens) for tokens in expected}) > len(expected) // 2, "the model says the same to everything"
    return expected


def test_requests_with_one_prompt_have_the_same_bits(tiny_dir):
    """The first computes it, and the others read whole pages of it together, which are no whole number of blocks."""
    driver, draw = Driver(make_core(tiny_dir, threads=2)), random.Random(1)
    common = [draw.randrange(5, VOCAB) for _ in range(300)]
    for i in range(24):
        prompt = common + [draw.randrange(5, VOCAB) for _ in range(draw.randrange(20, 200))]
        for choice in range(4):
            driver.add(f"{i}/{choice}", prompt, max_new_tokens=1, logprobs=0)
        while driver.core.requests:
            driver.take(driver.core.step())
        of = [[one for event in driver.events[f"{i}/{choice}"] for one in event.logprobs or ()] for choice in range(4)]
        assert all(other == of[0] for other in of), f"prompt {i} of {len(prompt)} tokens"
