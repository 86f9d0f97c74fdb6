"""Qwen2.5-VL and Qwen3.5: rows of an image have positions in three axes, and those behind it follow its longer edge."""

import pytest

from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.features.images.prompts import (
    OPTIONS,
    PROMPTS,
    answers,
    answers_of_a_batch,
    asked_of,
    check_evicted_and_retracted,
    tiles,
)
from tests.runtime.features.images.seeing import GridReference, save_seeing

IN_QWEN = [(text.replace("<image>", "<|vision_start|><image><|vision_end|>"), images) for text, images in PROMPTS]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def model(request, default_model_dir, tmp_path_factory):
    path = save_seeing(tmp_path_factory.mktemp("seeing") / request.param, default_model_dir, request.param)
    return asked_of(path, GridReference(path, request.param), IN_QWEN)


@pytest.mark.parametrize("options", OPTIONS)
def test_cold_warm_and_in_a_batch(model, options):
    path, prompts, expected = model
    driver = Driver(make_core(path, **options))
    for _ in range(2):
        assert answers(driver, prompts) == expected
    assert tiles(driver) == 3, "an image is one tile"
    assert answers_of_a_batch(driver, prompts, store=False) == expected


def test_a_prefix_that_ends_within_an_image(model):
    path, prompts, expected = model
    driver = Driver(make_core(path, page_size=1))
    cache, run = driver.core.cache, prompts[1][1].runs[0]
    for place in (run.start + 1, run.start + run.width + 2, run.stop - 1, run.stop, run.stop + 1):
        assert answers(driver, prompts[1:2]) == expected[1:2]
        cache.allocator.release(cache.tree.evict(cache.tree.num_evictable_pages - place))
        assert answers(driver, prompts[1:2]) == expected[1:2]


def test_evicted_and_retracted(model):
    check_evicted_and_retracted(model)
