"""Models with recurrent layers: greedy tokens in float32 are transformers', whatever the cache and the steps do."""

import random
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from radix import Namespace
from runtime.calls import ComputeNextTurn
from runtime.features.drafts.drafter import Drafter
from tests.namespaces import others
from tests.runtime.engine.driver import Driver, call, gives, make_core
from tests.runtime.execution.mixers.models import HYBRID_MODELS, oracle, save_hybrid

STOP, NEW = 2, 8
# The native kernels, torch, and torch's form for GPUs.
CODE = ["auto", "torch", "chunks"]
SIZES = [(16, 64, "off"), (1, 7, "on"), (16, 1, "on"), (4, 16, "off")]


def some(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(3, 320), k=count)


def conversation(draw: random.Random, turns: int, length: int = 30) -> list[int]:
    """Turns that end with the stop token, and the beginning of the next one."""
    return [token for _ in range(turns) for token in (*some(draw, draw.randrange(4, length)), STOP, 5, 6)]


@pytest.fixture(scope="module", params=list(HYBRID_MODELS))
def saved(request, tmp_path_factory):
    return save_hybrid(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def is_greedy(saved) -> Callable[[list[int], list[int]], bool]:
    """Whether transformers would give these tokens."""
    return partial(gives, oracle(saved))


class Asking(Driver):
    def __init__(self, path: Path, is_greedy: Callable[[list[int], list[int]], bool], code: str = "auto", **options):
        kernels = "torch" if code == "chunks" else code
        options = {"pool_tokens": 8192, "kernels": kernels} | options
        super().__init__(make_core(path, **options))
        if code == "chunks":
            self.core.executor.decoder.model.is_chunked = True
        self.is_greedy = is_greedy
        self.prompts: dict[str, list[int]] = {}

    def begin(self, prompt: list[int], count: int = NEW, **options) -> str:
        rid = f"{len(self.prompts)}"
        self.prompts[rid] = prompt
        self.add(rid, prompt, max_new_tokens=count, **options)
        return rid

    def ask(self, prompt: list[int], count: int = NEW, **options) -> list[int]:
        """Ask alone, and check the answer."""
        rid = self.begin(prompt, count, **options)
        self.run()
        self.check(rid)
        return self.tokens[rid]

    def check(self, *rids: str) -> None:
        for rid in rids or self.prompts:
            assert not self.tokens[rid] or self.is_greedy(self.prompts[rid], self.tokens[rid]), rid

    @property
    def latest(self) -> int:
        """Cached tokens of the latest request."""
        return self.cached(f"{len(self.prompts) - 1}")

    @property
    def free_slots(self) -> int:
        return len(self.core.strategies.default.free)


@pytest.mark.parametrize("code", CODE)
@pytest.mark.parametrize(("page_size", "chunk", "overlap"), SIZES)
def test_cold_warm_and_continued(saved, is_greedy, code, page_size, chunk, overlap):
    """A second request resumes at its last place; the next turn behind the answer; branches inside a page too."""
    driver, draw = (
        Asking(saved, is_greedy, code, page_size=page_size, chunk_tokens=chunk, overlap=overlap),
        random.Random(3),
    )
    slots, prompt = driver.free_slots, conversation(draw, 3)
    answer = driver.ask(prompt)
    assert driver.latest == 0
    assert driver.ask(prompt) == answer
    assert driver.latest >= len(prompt) - 2, "behind the last end of a turn"
    driver.ask([*prompt, *answer, STOP, *conversation(draw, 1)])
    assert driver.latest == len(prompt) + NEW - 1, "behind the last computed token"
    for parted in (len(prompt) - 8, len(prompt) - 9):
        driver.ask([*prompt[:parted], *some(draw, 9)])
        driver.ask([*prompt[:parted], *some(draw, 9)])
        assert driver.latest >= parted, "the request before has left a point where it parted"
    assert driver.free_slots == slots


def test_a_next_turn_is_computed_while_idle(saved, is_greedy):
    """Up to the end of its last whole page, where it leaves a point."""
    driver, draw = Asking(saved, is_greedy, next_turn_tokens=1000), random.Random(4)
    slots, prompt = driver.free_slots, conversation(draw, 3)
    driver.ask(prompt)
    turn = [*prompt, *conversation(draw, 12)]
    call(driver.core, ComputeNextTurn(array("i", turn).tobytes()))
    driver.run()
    driver.ask([*turn, *some(draw, 9)])
    assert driver.latest == len(turn) // 16 * 16 > len(prompt) + 128
    assert driver.free_slots == slots


@pytest.mark.parametrize("code", ["auto", "chunks"])
def test_a_step_that_fails_when_it_has_written_states_is_run_again(saved, is_greedy, code, monkeypatch):
    driver, draw = Asking(saved, is_greedy, code, page_size=4, chunk_tokens=16), random.Random(4)
    run, fails = driver.core.executor.run, random.Random(5)

    def fail_afterwards(batch):
        logits = run(batch)
        if fails.random() < 0.3:
            raise torch.OutOfMemoryError("no memory")
        return logits

    monkeypatch.setattr(driver.core.executor, "run", fail_afterwards)
    for _ in range(6):
        driver.begin(conversation(draw, 2))
    driver.run()
    driver.check()
    assert driver.core.state()["failed_steps"] > 3
    assert sum(len(tokens) == NEW for tokens in driver.tokens.values()) > 2


@pytest.mark.parametrize("code", ["auto", "chunks"])
def test_drafts_are_verified_and_rolled_back(saved, is_greedy, code, monkeypatch):
    """Right guesses, wrong ones, and both; the next turn resumes behind all that is certain."""
    driver, draw = Asking(saved, is_greedy, code, drafts="auto", page_size=4), random.Random(5)
    drafted = random.Random(6)

    def propose(self, requests, room, beside):
        """Guesses of which the first few are right."""
        found = {}
        for request in requests:
            left = request.max_length - len(request.tokens) - 1
            known = answers.get(tuple(request.tokens[: request.prompt_len]), [])[request.num_output :][: min(left, 6)]
            if known and drafted.random() < 0.8:
                right = drafted.randrange(len(known) + 1)
                found[request] = request.tokens[:0]
                found[request].extend([*known[:right], *(token ^ 1 for token in known[right:])])
        return found

    answers: dict[tuple[int, ...], list[int]] = {}
    prompts = [conversation(draw, 2) for _ in range(3)]
    for prompt in prompts:
        answers[tuple(prompt)] = driver.ask(prompt, 24)
    monkeypatch.setattr(Drafter, "propose", propose)
    for again in range(3):
        for prompt in prompts:
            driver.begin([*prompt], 20 + again)
        driver.run()
    driver.check()
    state = driver.core.state()
    assert 0 < state["accepted_tokens"] < state["drafted_tokens"]
    assert state["failed_requests"] == 0
    for prompt in prompts:
        turn = [*prompt, *answers[tuple(prompt)], *some(draw, 5)]
        driver.ask(turn)
        assert driver.latest >= len(prompt) + 24 - 7


def test_two_that_arrive_together_compute_what_they_share_once(saved, is_greedy):
    """The second waits for a point where both part, which the first makes for it."""
    draw, options = random.Random(8), {"page_size": 16, "chunk_tokens": 16, "step_tokens": 32}
    driver, shared = Asking(saved, is_greedy, **options), some(draw, 75)
    for _ in range(3):
        driver.begin([*shared, *some(draw, 12)])
    driver.run()
    driver.check()
    assert [driver.cached(f"{i}") for i in range(3)] == [0, 75, 75]


def test_none_waits_for_one_of_another_namespace(saved, is_greedy):
    """It could not read what it waits for."""
    draw = random.Random(8)
    driver, shared = Asking(saved, is_greedy, page_size=16, chunk_tokens=16, step_tokens=256), some(draw, 75)
    # Entries have namespaces of their own, and no requests.
    spaces = [space for space in (Namespace("a"), *others(Namespace("a"))) if not (space.entry or space.adapter)]
    for space in spaces:
        driver.begin([*shared, *some(draw, 12)], namespace=space)
    driver.step()
    assert len(driver.core.scheduler.running) == len(spaces) == 3
    driver.run()
    driver.check()


def test_shifted_prompts_have_no_cliff(saved, is_greedy):
    """The table of a known defect of caches with blocks of states: hits for a common part of any length."""
    draw, driver = random.Random(9), Asking(saved, is_greedy, page_size=16, pool_tokens=1 << 14)
    for shift in range(0, 200, 23):
        shared = some(draw, 100 + shift)
        for number in range(3):
            driver.ask([*shared, *some(draw, 7)], 1)
            assert number or not driver.latest
        assert driver.latest == len(shared)


def test_stored_for_nobody_and_for_one_tenant(saved, is_greedy):
    draw = random.Random(10)
    driver, prompt = Asking(saved, is_greedy, page_size=4), conversation(draw, 2)
    driver.ask(prompt, store=False)
    assert driver.core.cache.tree.num_pages == 0
    driver.ask(prompt, namespace=Namespace("a"))
    driver.ask(prompt, namespace=Namespace("b"))
    assert driver.latest == 0
    driver.ask(prompt, namespace=Namespace("a"), store=False)
    assert driver.latest > 0
