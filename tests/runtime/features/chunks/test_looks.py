"""Looks at long questions: what they take, and that they choose the same rows."""

import random

import pytest
import torch

from runtime.features.chunks import layout, looks
from tests.runtime.features.chunks.asks import build
from tests.runtime.features.chunks.plain import draw_tokens
from tests.runtime.reuse.contract.subject import World
from tests.runtime.reuse.contract.subjects import Fusion


@pytest.mark.parametrize("method", ["a3", "prophetkv"])
@pytest.mark.parametrize("step_tokens", [7, 256])
def test_the_end_of_a_long_question_chooses(ids_dir, monkeypatch, method, step_tokens):
    monkeypatch.setattr(layout, "LONGEST_QUESTION", 5)
    draw = random.Random(4)
    texts = [draw_tokens(draw, 60), draw_tokens(draw, 45)]
    world = World(Fusion(ids_dir), step_tokens=step_tokens)
    for rid, question in (("long", 30), ("short", 4), ("none", 0)):
        world.ask(rid, build(draw, texts, 20, question, method=method, granularity="token", longest_question=5))
    world.run()
    world.check()


def test_weights_of_all_rows_are_never_there_at_once(ids_dir, monkeypatch):
    bound, sizes, plain = 4000, [], looks._logits

    def counted(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        sizes.append(q.shape[0] * q.shape[1] * k.shape[0])
        return plain(q, k)

    monkeypatch.setattr(looks, "_MOST_WEIGHTS", bound)
    monkeypatch.setattr(looks, "_logits", counted)
    draw = random.Random(5)
    one = build(draw, [draw_tokens(draw, 60), draw_tokens(draw, 45)], 20, 40, method="prophetkv", granularity="token")
    world = World(Fusion(ids_dir))
    world.one("one", one)
    world.check(None)
    assert sizes
    assert max(sizes) <= bound < 40 * 105
