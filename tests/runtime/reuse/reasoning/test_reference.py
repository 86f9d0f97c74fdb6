"""The plain reading of ReasonCache against what the paper's formulas give by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers import DynamicCache

from tests.runtime.reuse.modules.plain import draw_tokens
from tests.runtime.reuse.reasoning.reference import (
    Reference,
    Rules,
    Shared,
    Step,
    alike,
    distinct_share,
    may_share,
    pages_of,
    pairs_of,
    score,
    steps,
    threshold,
)
from tests.tiny import save_tiny


def step(text, ids=(1, 2, 3)):
    return Step(0, len(ids), text, tuple(ids))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a", "\n\n", "b"], [(0, 2, "a\n\n")]),
        (["a\n", "\nb", "c\n\n"], [(0, 2, "a\n\nb"), (2, 3, "c\n\n")]),
        (["a", "\n", "\n", "b", "\n", "\n"], [(0, 3, "a\n\n"), (3, 6, "b\n\n")]),
        (["a\n\n\n\nb", "\n\n"], [(0, 1, "a\n\n\n\nb")]),
        (["a\n\n\n", "\n\n", "b", "\n\n"], [(0, 1, "a\n\n\n"), (1, 4, "\n\nb\n\n")]),
        (["a", "\n", "b"], []),
    ],
)
def test_steps_end_with_the_token_that_ends_a_blank_line(texts, expected):
    assert [(one.start, one.stop, one.text) for one in steps(range(len(texts)), texts)] == expected


def test_scores_and_thresholds_by_hand():
    assert score(step("abcd", (1, 1, 2)), step("ab", (1, 2, 2))) == pytest.approx(4 / 5 / 2)
    assert score(step("abc"), step("abc")) == pytest.approx(1)
    assert score(step("abc"), step("abc", (4, 5))) == 0
    assert threshold([]) == 0.9
    assert threshold([1, 1]) == pytest.approx(0.6)
    assert threshold([0.5, 0]) == pytest.approx(0.9 - 0.3 / 4)
    assert threshold([1.0], 1, 1) == 1


def test_both_filters_and_the_mean_over_all_steps():
    one, other = step("abc"), step("abd", (1, 2, 4))  # S = 2/3
    assert alike(one, [other], Rules(4), lambda a, b: True) == []
    often = [step("abc")] * 9 + [other]
    assert alike(one, often, Rules(4, most=10), lambda a, b: True) == often, "where steps repeat each other, tau is low"
    assert alike(one, [*often, often[0]], Rules(4), lambda a, b: a == b) == often[:4]
    assert alike(one, often, Rules(4, tau_max=1, tau_min=1), lambda a, b: True) == []


def test_pages_and_neighbours():
    assert pages_of(Step(3, 30, "", ()), 5, 8) == range(1, 4)
    assert not pages_of(Step(3, 9, "", ()), 6, 8)
    assert list(pairs_of(range(7, 10), range(2, 4))) == [(7, 2), (7, 3), (8, 2), (8, 3), (9, 3)]


def test_the_percentile_of_what_came_before():
    assert not may_share(0, [1.0] * 255, 99)
    assert may_share(1, [1.0] * 256, 0)
    before = [float(i) for i in range(1, 257)]
    assert may_share(204, before, 80)
    assert not may_share(206, before, 80)
    assert may_share(1e9, before[:7], 100), "all distances, however large or few"
    assert may_share(1, [3, 5, 7], 0, warm_up=3)


@pytest.fixture(scope="module")
def model(tiny_dir):
    return Reference(tiny_dir)


def filled(model, prompt):
    cache = DynamicCache()
    with torch.inference_mode():
        model.model(torch.tensor([prompt]), past_key_values=cache)
    return cache


def test_distances_by_hand(model):
    cache = filled(model, draw_tokens(random.Random(0), 24))
    total = 0.0
    for layer in cache.layers:
        for x in (layer.keys, layer.values):
            total += math.sqrt(sum(float(d) ** 2 for d in (x[0, :, :8] - x[0, :, 16:]).flatten()))
    assert model.distance(cache, 0, 2, 8) == pytest.approx(total / 3 / (8 * 2), rel=1e-5)
    for rotation in ("stale", "moved"):
        assert model.distance(cache, 1, 1, 8, rotation) == pytest.approx(0, abs=1e-6)
        there, back = (model.distance(cache, *pages, 8, rotation) for pages in ((0, 2), (2, 0)))
        assert there == pytest.approx(back, rel=1e-5)


@pytest.mark.parametrize("kind", ["llama", "llama_llama3", "llama_yarn"])
def test_moved_keys_are_those_of_the_place(tmp_path, default_model_dir, kind):
    """In the first layer keys depend on token and position alone."""
    model = Reference(save_tiny(kind, tmp_path, default_model_dir))
    text = draw_tokens(random.Random(1), 8)
    cache = filled(model, [*text, *draw_tokens(random.Random(2), 40), *text])
    keys = cache.layers[0].keys[0]
    assert (model.turn(keys[:, :8], 48) - keys[:, 48:]).abs().max() < 1e-4
    assert (keys[:, :8] - keys[:, 48:]).abs().max() > 0.1
    assert torch.allclose(cache.layers[0].values[0, :, :8], cache.layers[0].values[0, :, 48:], atol=1e-5)


def test_replaced_rows_are_read_from_their_step_on(model):
    prompt, output = draw_tokens(random.Random(3), 9), draw_tokens(random.Random(4), 30)
    plain = model.run(prompt, output, 4)
    with torch.inference_mode():
        whole = model.model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 :]
    assert torch.allclose(plain, whole, atol=2e-3)
    for rotation in ("stale", "moved"):
        found = model.run(prompt, output, 4, [Shared(25, 5, 3)], rotation)
        assert torch.allclose(found[:17], plain[:17], atol=2e-3)
        assert (found[17:] - plain[17:]).abs().amax(1).min() > 1e-2
    assert torch.allclose(model.run(prompt, output, 4, [Shared(25, 5, 5)]), plain, atol=2e-3)


def test_repeated_steps_share_and_no_others(model):
    prompt, one = draw_tokens(random.Random(5), 7), draw_tokens(random.Random(6), 15)
    other = draw_tokens(random.Random(7), 15)
    output, texts = [*one, 9, *one, 9, *other, 9, *one, 9, *other], ([*["abc "] * 15, "\n\n"]) * 5
    measured = []
    found, logits = model.serve(prompt, output, texts, Rules(4, 100), lambda a, b: True, measured)
    second, last = (pages_of(Step(start, start + 16, "", ()), 7, 4) for start in (16, 48))
    assert [one.page for one in found] == [*second, *last]
    assert [one.at for one in found] == [41, 41, 41, 73, 73, 73], "a page is full at 40, and at 72"
    assert all(one.source < second.start for one in found[:3])
    assert torch.allclose(logits, model.run(prompt, output, 4, found), atol=2e-3)
    assert len(measured) == 6
    assert distinct_share(86, 4, found) == pytest.approx(6 / 22)
    late, _ = model.serve(prompt, output, texts, Rules(4, 99, warm_up=3), lambda a, b: True, [])
    assert {one.page for one in late} <= set(last), "the first repetition was the warm-up"
    for nothing in (Rules(4, 99), Rules(4, 100, 1, 1)):
        assert model.serve(prompt, output, texts, nothing, lambda a, b: True, [])[0] == []
    assert model.serve(prompt, output, texts, Rules(4, 100), lambda a, b: False, [])[0] == []


def test_pages_that_share_with_one_another_count_once():
    assert distinct_share(33, 8, []) == 0
    assert distinct_share(33, 8, [Shared(20, 1, 0), Shared(30, 2, 1), Shared(30, 3, 3)]) == 2 / 5
