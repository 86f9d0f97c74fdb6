"""Models with recurrent layers: greedy tokens in float32 are transformers', whatever the cache and the steps do."""

import random

import pytest
import torch

from runtime.calls import AddPin, EraseTenant
from tests.runtime.engine.driver import Driver, call, greedy, make_core
from tests.runtime.execution.mixers.models import HYBRID_MODELS, oracle, save_hybrid

STOP, NEW = 2, 8


def conversation(draw: random.Random, turns: int, length: int = 30) -> list[int]:
    """Turns that end with the stop token."""
    return [
        token for _ in range(turns) for token in (*draw.choices(range(3, 320), k=draw.randrange(4, length)), STOP, 5, 6)
    ]


@pytest.fixture(scope="module", params=list(HYBRID_MODELS))
def saved(request, tmp_path_factory):
    return save_hybrid(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(saved):
    model, found = oracle(saved), {}

    def answer(prompt, count=NEW):
        key = (*prompt, count)
        if key not in found:
            found[key] = greedy(model, prompt, count)
        return found[key]

    return answer


def one(driver: Driver, rid: str, prompt: list[int], count: int = NEW, **options) -> list[int]:
    driver.add(rid, prompt, max_new_tokens=count, **options)
    driver.run()
    return driver.tokens[rid]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(("page_size", "chunk", "overlap"), [(16, 64, "off"), (1, 7, "on"), (16, 1, "on"), (4, 16, "off")])
def test_cold_warm_and_continued(saved, reference, kernels, page_size, chunk, overlap):
    """A second request resumes at its last place; the next turn behind the answer; branches inside a page too."""
    core = make_core(
        saved, kernels=kernels, page_size=page_size, chunk_tokens=chunk, overlap=overlap, pool_tokens=8192
    )
    driver, draw = Driver(core), random.Random(3)
    prompt = conversation(draw, 3)
    answer = reference(prompt)
    assert one(driver, "cold", prompt) == answer
    assert driver.cached("cold") == 0
    assert one(driver, "warm", prompt) == answer
    assert driver.cached("warm") == len(prompt) - 3, "behind the last end of a turn"
    turn = [*prompt, *answer, STOP, *conversation(draw, 1)]
    assert one(driver, "turn", turn) == reference(turn)
    assert driver.cached("turn") == len(prompt) + NEW - 1, "behind the last computed token"
    for number, parted in enumerate((len(prompt) - 8, len(prompt) - 9)):
        branch = [*prompt[:parted], *draw.choices(range(3, 320), k=9)]
        assert one(driver, f"branch {number}", branch) == reference(branch)
        again = [*prompt[:parted], *draw.choices(range(3, 320), k=9)]
        assert one(driver, f"again {number}", again) == reference(again)
        assert driver.cached(f"again {number}") >= parted, "the branch before has left a point where it parted"
