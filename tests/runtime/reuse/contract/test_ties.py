"""The check of BiCache's answers: it allows what float32 cannot tell apart, and nothing else."""

import pytest

from runtime.features.diffusion.canvas import Canvas
from tests.runtime.reuse.contract.subject import World
from tests.runtime.reuse.contract.subjects import SUBJECTS, BiCache


@pytest.fixture(scope="module")
def bicache(request):
    return SUBJECTS["bicache"].make(request.getfixturevalue)


def answer(bicache: BiCache, seed: int, count: int, **fields) -> tuple[World, list[int]]:
    world, (prompt, more) = World(bicache, page_size=1), bicache.anything(seed)
    return world, world.one("r", (prompt, more | fields), count)


def test_of_equally_sure_masks_any_may_be_decided_first(bicache, monkeypatch):
    """Guidance makes several confidences round to 1; what the other masks become depends on which one is taken."""
    found = []
    for which in (0, -1):
        with monkeypatch.context() as patched:
            patched.setattr(Canvas, "_select", lambda _, sure, noise, at=which: (sure == sure.max()).nonzero()[at])
            world, tokens = answer(bicache, 9, 40)
        world.check(40)
        found.append(tokens)
    assert found[0] != found[1]


def decide_the_second(canvas, sure, noise):
    return sure.topk(min(2, len(sure))).indices[-1:]


def take_the_second(canvas, logits, temperature):
    return logits.topk(2).indices[:, 1], logits.softmax(-1).amax(-1)


@pytest.mark.parametrize(
    ("patch", "fields"),
    [
        ({"_select": decide_the_second}, {}),
        ({"_choose_llada": take_the_second}, {}),
        ({}, {"depth": 4, "prefix_tokens": 64, "refresh_interval": 4}),
    ],
    ids=["another mask", "another token", "stale KV"],
)
@pytest.mark.parametrize("count", [6, 40])
def test_a_real_difference_is_noticed(bicache, monkeypatch, patch, fields, count):
    for name, other in patch.items():
        monkeypatch.setattr(Canvas, name, other)
    world, _ = answer(bicache, 9, count, **fields)
    with pytest.raises(AssertionError):
        world.check(count)
