"""Denoising in the engine, without reuse: the published samplers' tokens, in any batch."""

import math
import random

import pytest

from tests.runtime.features.diffusion.bicache.driver import DenoiseDriver, make_core
from tests.runtime.features.diffusion.bicache.models import EOS, MASK
from tests.runtime.features.diffusion.bicache.reference import dream, llada

draw = random.Random(5)
PROMPTS = [[draw.randrange(EOS) for _ in range(n)] for n in (1, 7, 16, 33, 50)]


def settings(kind: str):
    """Different lengths, steps and algorithms, with what the reference says to each prompt."""
    if kind == "llada":
        return [{"gen_length": 8 + 8 * i, "steps": 4 + 4 * i, "block_length": 8} for i in range(5)]
    algorithms = ["entropy", "maskgit_plus", "topk_margin", "entropy", "topk_margin"]
    return [{"gen_length": 5 + 6 * i, "steps": 5 + 4 * i, "algorithm": a, "block_length": 5 + 6 * i}
            for i, a in enumerate(algorithms)]  # fmt: skip


def expected(plain, setting, prompt):
    if plain.is_llada:
        return llada(plain, prompt, setting["gen_length"], setting["steps"], setting["block_length"])
    return dream(plain, prompt, setting["gen_length"], setting["steps"], setting["algorithm"], 1e-3)


@pytest.mark.parametrize(("kernels", "page_size"), [("torch", 1), ("auto", 16)])
def test_tokens_are_the_references(any_dir, any_plain, kernels, page_size):
    driver = DenoiseDriver(make_core(any_dir, kernels=kernels, page_size=page_size))
    wanted = []
    for i, (setting, prompt) in enumerate(
        zip(settings("llada" if any_plain.is_llada else "dream"), PROMPTS, strict=True)
    ):
        driver.denoise(str(i), prompt, **setting)
        wanted.append(expected(any_plain, setting, prompt))
        driver.step()
    driver.run()
    assert [driver.tokens[str(i)] for i in range(5)] == wanted
    assert len({tuple(tokens) for tokens in wanted}) == 5
    state = driver.core.state()
    assert state["pages_free"] == state["pages_total"], "nothing was declared as shared"


def test_a_small_budget_gives_everybody_turns(deep_dir):
    def run(**options):
        driver = DenoiseDriver(make_core(deep_dir, **options))
        for i, prompt in enumerate(PROMPTS):
            driver.denoise(str(i), prompt, gen_length=16)
        driver.run()
        return driver

    small, large = run(step_tokens=60), run()
    assert small.tokens == large.tokens
    assert large.steps == 16
    assert 32 < small.steps < 5 * 16
    ends = [next(s for s, e in enumerate(small.events[str(i)]) if e.finish) for i in range(5)]
    assert max(ends) <= 16, "each has one event a step at most"


def test_it_ends_where_the_text_does(any_dir):
    """Choosing the k-th output token as the stop token ends the request with it, and early."""
    driver = DenoiseDriver(make_core(any_dir))
    tokens = driver.one(PROMPTS[1], gen_length=24, steps=24, block_length=4)
    steps = driver.report(driver.last())["denoise_steps"]
    stop = tokens[5]
    ended = driver.one(PROMPTS[1], gen_length=24, steps=24, block_length=4, sampling={"stop_token_ids": [stop]})
    assert ended == tokens[: tokens.index(stop) + 1]
    last = driver.last()
    assert (driver.finish[last].type, driver.finish[last].matched) == ("stop", stop)
    assert driver.report(last)["denoise_steps"] < steps


def test_events_are_the_decided_beginning(deep_dir):
    driver = DenoiseDriver(make_core(deep_dir))
    tokens = driver.one(PROMPTS[2], gen_length=16, steps=8, block_length=16, stream_canvas=True)
    events = driver.events[driver.last()]
    assert len(events) == 8
    sent = []
    for event in events:
        sent += event.tokens
        gap = event.shown.index(MASK) if MASK in event.shown else 16
        assert event.shown[:gap] == sent == tokens[:gap]
        assert sum(token == MASK for token in event.shown) == 16 - 2 * (events.index(event) + 1)


@pytest.mark.parametrize(
    ("value", "setting"),
    [
        (math.nan, {}),
        (math.inf, {"sampling": {"temperature": 0.7, "seed": 1, "top_p": 0.9}}),
        (math.inf, {"cfg_scale": 1}),
    ],
)
def test_logits_that_are_no_numbers_end_their_request_alone(any_dir, monkeypatch, value, setting):
    """At a later step, with the error and the counter of causal models; what it shared is computed anew."""
    plain, driver = DenoiseDriver(make_core(any_dir)), DenoiseDriver(make_core(any_dir))
    same = {"gen_length": 8, "steps": 4, "depth": 2, **setting}
    shared = PROMPTS[3][:32]
    wanted = plain.one([*shared, 1], prefix_tokens=32, **same)
    core, decoding = driver.core, driver.core.decoding
    choose, batch_sizes, run = decoding.choose, [], core.executor.run

    def poisoned(work, logit_rows, logits, version):
        logits = logits.clone()
        for item, (mine, *_) in zip(work, logit_rows, strict=True):
            if item.request.rid == "bad" and item.request.decoding_state.num_steps == 1:
                logits[mine.start, 7] = value
        return choose(work, logit_rows, logits, version)

    def counted(batch):
        batch_sizes.append(len(core.scheduler.running))
        return run(batch)

    monkeypatch.setattr(decoding, "choose", poisoned)
    monkeypatch.setattr(core.executor, "run", counted)
    driver.denoise("bad", [*shared, 2], prefix_tokens=32, **same)
    driver.denoise("sound", PROMPTS[2], **same)
    driver.run()
    assert max(batch_sizes) == 2
    assert driver.tokens["sound"] == plain.one(PROMPTS[2], **same)
    assert driver.finish["bad"].type == "error"
    assert "not finite" in driver.finish["bad"].message
    state = core.state()
    assert (state["bad_logits"], state["failed_requests"], state["pages_private"]) == (1, 1, 0)
    assert state["tree_nodes"] == len(core.strategies.default.boundaries) == 0
    assert driver.one([*shared, 1], prefix_tokens=32, **same) == wanted
