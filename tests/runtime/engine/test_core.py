"""The engine core: shared prompts, failing steps, pauses, ends, log-probabilities."""

import time

import pytest
import torch

from runtime.calls import Pause
from tests.runtime.engine.driver import Driver, call, make_core


@pytest.mark.parametrize("out_of_memory", [False, True])
def test_one_poisoned_request_fails_alone(ids_dir, monkeypatch, out_of_memory):
    core = make_core(ids_dir, prefix_cache=False)
    driver = Driver(core)
    prompts = [[i, 20, 30, 40] for i in range(1, 8)]
    plain = Driver(make_core(ids_dir, prefix_cache=False)).together(prompts, max_new_tokens=6)
    run = core.executor.run

    def poisoned(batch):
        if 7 in batch.tokens[batch.positions == 0].tolist():
            raise torch.OutOfMemoryError("no memory") if out_of_memory else RuntimeError("a secret")
        return run(batch)

    monkeypatch.setattr(core.executor, "run", poisoned)
    for i, prompt in enumerate(prompts):
        driver.add(str(i), prompt, max_new_tokens=6)
    driver.run()
    assert driver.finish["6"].type == "error"
    assert "secret" not in (driver.finish["6"].message or "")
    assert [driver.tokens[str(i)] for i in range(6)] == plain[:6]
    assert core.state()["failed_requests"] == 1
    assert core.state()["failed_steps"] >= 3


def test_the_output_of_a_request_that_fails_is_not_cached(ids_dir, monkeypatch):
    core = make_core(ids_dir, page_size=4)
    driver = Driver(core)
    driver.add("bad", list(range(100, 108)), max_new_tokens=40)
    while len(driver.tokens["bad"]) < 20:
        driver.step()

    def failing(batch):
        raise RuntimeError("broken")

    monkeypatch.setattr(core.executor, "run", failing)
    driver.run()
    assert driver.finish["bad"].type == "error"
    assert core.cache.tree.num_pages == 2, "the prompt's"


def test_a_step_s_time_is_divided_among_its_rows(ids_dir):
    """12 rows and 4: their pages cost three parts and one of what the step took, and no more than that."""
    driver = Driver(make_core(ids_dir, page_size=4))
    for rid, prompt in (("long", list(range(100, 112))), ("short", list(range(200, 204)))):
        driver.add(rid, prompt, max_new_tokens=2)
    started = time.monotonic()
    driver.step()
    elapsed = time.monotonic() - started
    costs = {len(node.pages): node.cost for node in driver.core.cache.tree.nodes()}
    assert costs[3] == pytest.approx(3 * costs[1])
    assert 0 < costs[3] + costs[1] <= elapsed


@pytest.mark.parametrize("token", [-1, 4096, 2**31 - 1])
def test_a_token_that_the_model_does_not_have_is_refused(ids_dir, token):
    """A kernel would read what lies behind the embeddings."""
    driver = Driver(make_core(ids_dir))
    driver.add("bad", [5, token, 6], max_new_tokens=2)
    driver.add("good", [5, 4095, 6], max_new_tokens=2)
    driver.run()
    finish = driver.finish["bad"]
    assert (finish.refused, finish.param) == (True, "prompt")
    assert finish.message == f"token id {token} is out of range: the model has 4096 tokens"
    assert driver.finish["good"].type == "length"


def test_a_prompt_can_be_read_without_an_answer(ids_dir):
    driver = Driver(make_core(ids_dir, chunk_tokens=8))
    driver.add("read", list(range(40, 60)), max_new_tokens=0, prompt_logprobs_from=0, logprobs=0)
    driver.run()
    assert driver.tokens["read"] == []
    assert driver.finish["read"].type == "length"
    assert sum(len(event.prompt_logprobs or []) for event in driver.events["read"]) == 20


def test_a_paused_engine_accepts_but_computes_nothing(ids_dir):
    driver = Driver(make_core(ids_dir))
    (plain,) = driver.together([[4, 5, 6]], max_new_tokens=6)
    driver.add("held", [4, 5, 6], max_new_tokens=6)
    driver.step()
    assert call(driver.core, Pause(True)) is True
    driver.add("left", [7, 8], max_new_tokens=6)
    steps = driver.core.counters["steps"]
    for _ in range(3):
        driver.step()
    assert not driver.core.busy
    assert driver.core.counters["steps"] == steps
    driver.abort("left")
    call(driver.core, Pause(False))
    driver.run()
    assert driver.tokens["held"] == plain
    assert driver.finish["left"].type == "abort"


def test_what_can_never_fit_into_the_pool_is_refused_at_once(ids_dir):
    driver = Driver(make_core(ids_dir, page_size=4, pool_tokens=64))
    driver.add("whole pool", range(100, 160), max_new_tokens=4)
    driver.add("one more", range(100, 160), max_new_tokens=5)
    assert (driver.finish["one more"].refused, driver.finish["one more"].code) == (True, "context_length_exceeded")
    driver.run()
    assert driver.finish["whole pool"].type == "length"


def test_stop_token_minimum_and_ignore_eos(ids_dir):
    driver = Driver(make_core(ids_dir))
    (free,) = driver.together([[5, 6, 7]], max_new_tokens=12)
    stop = free[3]
    first = free.index(stop)
    driver.add("stop", [5, 6, 7], max_new_tokens=12, stop_token_ids=[stop])
    driver.add("minimum", [5, 6, 7], max_new_tokens=12, stop_token_ids=[stop], min_new_tokens=first + 3)
    driver.run()
    assert driver.tokens["stop"] == free[: first + 1]
    assert (driver.finish["stop"].type, driver.finish["stop"].matched) == ("stop", stop)
    assert len(driver.tokens["minimum"]) >= first + 3
    assert stop not in driver.tokens["minimum"][: first + 2]


def test_prompt_and_output_logprobs_equal_transformers(ids_dir):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ids_dir, dtype=torch.float32).eval()
    prompt = list(range(300, 340))
    driver = Driver(make_core(ids_dir, chunk_tokens=7))
    driver.together([prompt], max_new_tokens=1)
    driver.add("p", prompt, max_new_tokens=3, logprobs=2, prompt_logprobs_from=25)
    driver.add("all", prompt, max_new_tokens=1, logprobs=0, prompt_logprobs_from=0)
    driver.run()
    full = prompt + driver.tokens["p"]
    with torch.inference_mode():
        logprobs = model(torch.tensor([full])).logits[0].log_softmax(-1)
    reported = [entry for event in driver.events["p"] for entry in event.prompt_logprobs or []]
    assert [entry.token for entry in reported] == prompt[25:]
    for position, entry in enumerate(reported, start=25):
        assert entry.logprob == pytest.approx(float(logprobs[position - 1, entry.token]), abs=1e-4)
        assert [token for token, _ in entry.top] == logprobs[position - 1].topk(2).indices.tolist()
    output = [entry for event in driver.events["p"] for entry in event.logprobs or []]
    assert [entry.token for entry in output] == driver.tokens["p"]
    for position, entry in enumerate(output, start=len(prompt)):
        assert entry.logprob == pytest.approx(float(logprobs[position - 1, entry.token]), abs=1e-4)
    everything = [entry for event in driver.events["all"] for entry in event.prompt_logprobs or []]
    assert [entry.token for entry in everything] == prompt
    assert everything[0].logprob is None
    driver.flush()
    driver.add("cold", prompt, max_new_tokens=1, logprobs=2, prompt_logprobs_from=25)
    driver.run()
    cold = [entry.token for event in driver.events["cold"] for entry in event.prompt_logprobs or []]
    assert cold == prompt[25:], "chunks that end before the first wanted token report nothing"


def test_a_prompt_s_progress_is_told_step_by_step(ids_dir):
    driver, prompt = Driver(make_core(ids_dir, page_size=4, chunk_tokens=16)), list(range(100, 150))
    driver.add("a", prompt, max_new_tokens=2, progress=True)
    driver.add("b", prompt[::-1], max_new_tokens=2)
    driver.run()
    assert [event.computed for event in driver.events["a"]] == [16, 32, 48, 0, 0]
    assert driver.events["a"][0].admission is not None
    assert [len(event.tokens) for event in driver.events["b"]] == [1, 1]
    driver.add("c", [*prompt[:40], 7, 8], max_new_tokens=1, progress=True)
    driver.run()
    (event,) = driver.events["c"]
    assert (event.computed, event.admission.cached_tokens) == (0, 40), "one step computes the rest"
