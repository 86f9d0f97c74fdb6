"""The engine's ReasonCache against the plain reading of the paper."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding
from runtime.models.spec import ModelSpec
from runtime.reuse.reasoning.distance import Distances, Page
from runtime.reuse.reasoning.formal import agree
from runtime.reuse.reasoning.reservoir import Reservoir
from runtime.reuse.reasoning.steps import Splitter, similarity, threshold
from tests.runtime.reuse.modules.plain import draw_tokens
from tests.runtime.reuse.reasoning import reference as plain

TEXTS = st.lists(
    st.sampled_from(["a", " b", "c.", "\n", "\n\n", "d\n", "\n\ne", " ", "\n \n", "f\n\n\ng", ""]), max_size=40
)


@settings(max_examples=200, deadline=None)
@given(texts=TEXTS, data=st.data())
def test_steps_scores_and_thresholds(texts, data):
    ids = [data.draw(st.integers(0, 4)) for _ in texts]
    splitter = Splitter()
    found = [step for step in map(splitter.push, ids, texts) if step is not None]
    expected = plain.steps(ids, texts)
    assert [(one.start, one.end, one.text) for one in found] == [(one.start, one.stop, one.text) for one in expected]
    for i in range(1, len(found)):
        scores = [similarity(found[i], found[j]) for j in range(i)]
        assert scores == pytest.approx([plain.score(expected[i], expected[j]) for j in range(i)])
        assert threshold(scores, 0.9, 0.6) == pytest.approx(plain.threshold(scores, 0.9, 0.6))


@pytest.mark.parametrize(("a", "b", "expected"), plain.FORMAL)
def test_formal_language(a, b, expected):
    assert agree(a, b) == agree(b, a) == expected


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), percentile=st.sampled_from([0, 10, 50, 80, 99, 100]))
def test_percentiles(seed, percentile):
    draw, reservoir, measured = random.Random(seed), Reservoir(warm_up=10), []
    for _ in range(60):
        distance = draw.expovariate(1)
        most = reservoir.threshold(percentile)
        assert (distance <= most) == plain.may_share(distance, measured, percentile, 10)
        if measured[10:] and percentile < 100:
            assert most == pytest.approx(np.percentile(measured, percentile))
        reservoir.add(distance)
        measured.append(distance)


@pytest.mark.parametrize("page_size", [4, 16])
def test_distances(tiny_dir, page_size):
    """Of pages anywhere in the pool, in their places and without their rotations."""
    model, spec = plain.Reference(tiny_dir), ModelSpec.load(tiny_dir)
    tokens = draw_tokens(random.Random(page_size), 6 * page_size)
    cache = DynamicCache()
    with torch.inference_mode():
        model.model(torch.tensor([tokens]), past_key_values=cache)
    heads, width = cache.layers[0].keys.shape[1], cache.layers[0].keys.shape[3]
    pool = KVPool(len(cache.layers), 9, page_size, heads, width, torch.float32, torch.device("cpu"))
    places = [7, 2, 0, 8, 5, 3]
    for number, layer in enumerate(cache.layers):
        for ordinal, place in enumerate(places):
            slots = torch.arange(place * page_size, (place + 1) * page_size)
            rows = plain.rows_of(ordinal, page_size)
            pool.write(number, slots, *(x[0, :, rows].transpose(0, 1) for x in (layer.keys, layer.values)))
    distances = Distances(pool, RotaryEmbedding(spec.rope, width, torch.device("cpu")))
    pages = [Page(place, ordinal * page_size) for ordinal, place in enumerate(places)]
    for a in range(6):
        for b in range(6):
            for rotation in ("stale", "moved"):
                expected = model.distance(cache, a, b, page_size, rotation)
                assert distances.between(pages[a], pages[b], rotation == "moved") == pytest.approx(expected, abs=2e-3)
