"""Steady decode one step ahead gives what it gives in step, whatever ends, fails or comes while a step is in flight."""

import random
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import AutoModelForCausalLM

from runtime.config import make_config
from runtime.errors import EngineDead, ModelError
from runtime.execution.device import choose_overlap
from runtime.sampling.sampler import Sampled, Sampler
from tests.runtime.engine.driver import Driver, greedy, make_core
from tests.runtime.sampling.test_sampling import request

CPU = torch.device("cpu")
NEW = 12


class Overlapping(Driver):
    """Counts what is launched ahead.

    Attributes:
        ahead: rows of each step that was launched before the one ahead of it was read.
        log: `run` and `read` in their order.
        is_ahead: whether the step that is launched now is ahead.
    """

    def __init__(self, path, **options: Any):
        options = {"overlap": "on", "kernels": "torch"} | options
        super().__init__(make_core(path, **options))
        self.ahead: list[int] = []
        self.log: list[str] = []
        self.is_ahead = False
        launch = self.core._launch

        def watched(work, before=None):
            self.is_ahead = before is not None
            flight = launch(work, before)
            self.ahead += [len(work)] * (before is not None)
            self.log.append("run")
            if flight.sampled is not None:
                read = flight.sampled.read
                flight.sampled.read = lambda: self.log.append("read") or read()
            return flight

        self.core._launch = watched


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(5)
    root = [draw.randrange(49152) for _ in range(40)]
    return [
        root[: draw.randrange(0, 41)] + [draw.randrange(49152) for _ in range(draw.randrange(1, 20))] for _ in range(10)
    ]


@pytest.fixture(scope="module")
def free(tiny_dir, prompts):
    """Greedy continuation of each prompt by transformers."""
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()
    return [greedy(model, prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_mixed_batches_give_transformers_tokens(tiny_dir, prompts, free, kernels):
    driver = Overlapping(tiny_dir, kernels=kernels, step_tokens=24, page_size=4)
    for i, prompt in enumerate(prompts):
        driver.add(str(i), prompt, max_new_tokens=NEW)
        for _ in range(i % 4):
            driver.step()
    driver.run()
    assert [driver.tokens[str(i)] for i in range(len(prompts))] == free
    assert len(driver.ahead) >= NEW - 2


def test_a_step_is_launched_before_the_one_ahead_of_it_is_read(tiny_dir):
    driver = Overlapping(tiny_dir)
    driver.together([[1, 2, 3], [4, 5]], max_new_tokens=5)
    assert driver.log == ["run", "run", "read", "run", "read", "run", "read", "run", "read", "read"]
    assert driver.ahead == [2, 2, 2, 2], "also behind the step with the prompts"


@pytest.mark.parametrize("bias", [{}, {0: -5.0}])
def test_a_step_ahead_may_stop_at_the_minimum_and_not_before(tiny_dir, prompts, free, bias):
    tokens = free[0]
    least = next(i for i in range(3, NEW) if tokens[i] not in tokens[:i])
    driver = Overlapping(tiny_dir)
    for rid, end in (("a", least), ("b", least - 1)):
        ends = {"min_new_tokens": least, "stop_token_ids": [tokens[end]]}
        driver.add(rid, prompts[0], max_new_tokens=NEW, logit_bias=bias, **ends)
    driver.run()
    assert driver.ahead
    assert driver.tokens["a"] == tokens[: least + 1]
    assert driver.tokens["b"][: least - 1] == tokens[: least - 1]
    assert driver.tokens["b"][least - 1] != tokens[least - 1]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.02, "frequency_penalty": 0.7},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"repetition_penalty": 1.7, "temperature": 0.9},
    {"logit_bias": {5: 30.0, 9: 29.0}, "presence_penalty": 2.0},
    {"logprobs": 3},
    {"temperature": 1.0, "logprobs": 0},
    {"min_new_tokens": 6},
    {"regex": "[0-9]{6,9}"},
]


def test_rows_of_a_request_that_ends_unforeseen_are_thrown_away(tiny_dir, prompts, free):
    """The tree then holds the rows that were read, and none computed behind the end."""
    end = next(n for n in range(3, NEW) if free[0][n - 1] not in free[0][: n - 1])
    driver = Overlapping(tiny_dir, page_size=1)
    driver.add("stops", prompts[0], max_new_tokens=NEW, stop_token_ids=[free[0][end - 1]])
    driver.add("goes on", [7, 8, 9], max_new_tokens=NEW)
    driver.run()
    assert driver.tokens["stops"] == free[0][:end]
    assert driver.tokens["goes on"] == Driver(make_core(tiny_dir)).together([[7, 8, 9]], max_new_tokens=NEW)[0]
    assert driver.ahead[end - 2 : end + 1] == [2, 2, 1], "one row was in flight when it ended"
    driver.add("again", [*prompts[0], *free[0], 7], max_new_tokens=1)
    driver.run()
    assert driver.cached("again") == len(prompts[0]) + end - 1


def test_whoever_reaches_its_limit_is_not_in_the_next_step(tiny_dir):
    driver = Overlapping(tiny_dir)
    for i in range(4):
        driver.add(str(i), [i, 7], max_new_tokens=3 + i)
    driver.run()
    assert driver.ahead == [4, 4, 3, 2, 1]
    assert driver.core.counters["generation_tokens"] == 3 + 4 + 5 + 6


def test_those_who_wait_do_not_wait_longer_for_foreseen_ends(tiny_dir):
    steps = []
    for overlap in ("off", "on"):
        driver = Overlapping(tiny_dir, max_running=2, overlap=overlap)
        for i in range(7):
            driver.add(str(i), [i, 7, 8], max_new_tokens=3 + 2 * i % 5)
        driver.run()
        steps.append(driver.core.counters["steps"])
    assert driver.ahead
    assert steps[0] == steps[1]


def test_who_waits_for_memory_does_not_hold_up_those_who_run(tiny_dir):
    driver = Overlapping(tiny_dir, page_size=4, pool_tokens=64)
    driver.add("runs", list(range(100, 130)), max_new_tokens=20)
    driver.step()
    driver.add("waits", list(range(200, 240)), max_new_tokens=4)
    seen = []
    driver.run(lambda _: seen.append((len(driver.core.scheduler.waiting), len(driver.ahead))))
    assert [ahead for waiting, ahead in seen if waiting][-1] > 10
    assert len(driver.tokens["waits"]) == 4


def test_a_step_that_cannot_be_launched_ahead_is_run_in_step(tiny_dir, prompts):
    specs = [{**variant, "seed": 3} for variant in VARIANTS[:7]]
    driver, plain = Overlapping(tiny_dir), Driver(make_core(tiny_dir, kernels="torch"))
    run, draw = driver.core.executor.run, random.Random(1)

    def fail(batch):
        logits = run(batch)
        if driver.is_ahead and draw.random() < 0.5:
            raise torch.OutOfMemoryError("no memory")  # with the pool written
        return logits

    driver.core.executor.run = fail
    for one in (driver, plain):
        for i, spec in enumerate(specs):
            one.add(str(i), prompts[i], max_new_tokens=NEW, **spec)
        one.run()
    assert driver.tokens == plain.tokens
    state = driver.core.state()
    assert (state["failed_steps"] > 2, state["failed_requests"]) == (True, 0)
    assert driver.ahead


@pytest.mark.parametrize("bad", [1, 4, 9])
def test_a_step_that_fails_in_flight_is_run_again_with_all_behind_it(tiny_dir, prompts, monkeypatch, bad):
    """Drawn tokens and penalties, too, are those of a step that did not fail. `bad`: which of those with one behind."""
    specs = [{**variant, "seed": 3} for variant in VARIANTS[:9]]
    driver, plain = Overlapping(tiny_dir), Driver(make_core(tiny_dir, kernels="torch"))
    read, reads = Sampled.read, []

    def fail(sampled):
        reads.append(driver.core._in_flight is not None)
        if reads[-1] and sum(reads) == bad:
            raise RuntimeError("the device says no")
        return read(sampled)

    for one in (plain, driver):
        if one is driver:
            monkeypatch.setattr(Sampled, "read", fail)
        for i, spec in enumerate(specs):
            one.add(str(i), prompts[i], max_new_tokens=NEW, **spec)
        one.run()
    assert driver.tokens == plain.tokens
    state = driver.core.state()
    assert (state["failed_steps"], state["failed_requests"]) == (1, 0)


def test_logits_that_are_no_numbers_end_their_request_alone(tiny_dir, prompts, free):
    driver = Overlapping(tiny_dir)
    run = driver.core.executor.run

    def bad(batch):
        logits = run(batch).clone()
        logits[batch.positions[batch.logits_rows] == 104] = torch.nan
        return logits

    driver.core.executor.run = bad
    variants = [{}, {"temperature": 1.0}, {"temperature": 1.0, "frequency_penalty": 1.0}]
    for i, variant in enumerate(variants):
        driver.add(f"bad{i}", list(range(100, 200)), max_new_tokens=NEW, **variant)
        driver.add(str(i), prompts[i], max_new_tokens=NEW)
    driver.run()
    for i in range(3):
        assert driver.finish[f"bad{i}"].type == "error"
        assert len(driver.tokens[f"bad{i}"]) == 5
        assert driver.tokens[str(i)] == free[i]
    assert driver.core.state()["bad_logits"] == 3
    assert max(driver.ahead) == 6


def test_aborted_with_a_step_in_flight_and_back_under_the_same_name(tiny_dir, prompts, free):
    driver = Overlapping(tiny_dir, page_size=2)
    driver.add("a", prompts[0], max_new_tokens=NEW)
    while driver.core._in_flight is None:
        driver.step()
    driver.abort("a")
    assert driver.core.busy, "what is in flight has to be dropped"
    driver.flush()
    driver.core.cache.check([])
    assert driver.core.state()["pages_private"] == 0
    del driver.finish["a"]
    driver.add("a", prompts[1], max_new_tokens=NEW)
    driver.run()
    assert driver.tokens["a"] == free[1]


def test_choosing_waits_for_nothing():
    """Fake tensors have no values: whatever asks for one fails."""
    sampler = Sampler(40, CPU)
    asking = [request((3, 4, 5), 2, seed=1, **{k: v for k, v in variant.items() if k != "logprobs"})
              for variant in VARIANTS if "regex" not in variant]  # fmt: skip
    asking[0].message.logprobs = asking[1].message.logprobs = 2
    sampler.sample(torch.randn(len(asking), 40), asking).read()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for one in asking:
            if (seen := one.sampler.seen) is not None:
                seen.counts, seen._host = mode.from_tensor(seen.counts), None  # as on a GPU
        sampled = sampler.sample(torch.randn(len(asking), 40), asking, ahead=1)
        assert sampled.on_device(asking).shape == (len(asking),)
        with pytest.raises(DataDependentOutputException):
            sampled.read()


def test_it_is_for_gpus_and_one_process_unless_asked_for():
    cuda = torch.device("cuda")

    def chosen(device, **options):
        return choose_overlap(make_config(**options), device)

    assert (chosen(CPU), chosen(cuda), chosen(cuda, tensor_parallel=2)) == (False, True, False)
    assert (chosen(CPU, overlap="on"), chosen(cuda, overlap="off")) == (True, False)
    with pytest.raises(ModelError, match="--tensor-parallel"):
        chosen(cuda, overlap="on", tensor_parallel=2)


def test_a_device_that_is_lost_ends_the_engine(tiny_dir, monkeypatch):
    """Otherwise every later request would fail, one by one."""
    driver = Overlapping(tiny_dir)
    driver.add("a", [1, 2, 3], max_new_tokens=NEW)
    while driver.core._in_flight is None:
        driver.step()

    def fail():
        raise RuntimeError("an illegal memory access was encountered")

    driver.core._in_flight.sampled.read = fail
    monkeypatch.setattr("runtime.engine.core.is_lost", lambda device: device == CPU)
    with pytest.raises(EngineDead, match="cpu cannot be used"):
        driver.step()
