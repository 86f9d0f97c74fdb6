"""Qwen2.5-VL and Qwen3.5: rows of an image have positions in three axes, and those behind it follow its longer edge."""

import pytest

from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.features.images.seeing import GridReference, save_seeing, sight_of
from tests.runtime.features.images.test_exact_images import NEW, PROMPTS, answers, send, tiles, tokens_of

IN_QWEN = [(text.replace("<image>", "<|vision_start|><image><|vision_end|>"), images) for text, images in PROMPTS]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def model(request, default_model_dir, tmp_path_factory):
    """A directory, its prompts, and what transformers makes of them."""
    path = save_seeing(tmp_path_factory.mktemp("seeing") / request.param, default_model_dir, request.param)
    plain, sight = GridReference(path, request.param), sight_of(path)
    expected = [plain.greedy(text, images, NEW) for text, images in IN_QWEN]
    assert len({*map(tuple, expected)}) == len(expected)
    return path, [tokens_of(sight, plain, *prompt) for prompt in IN_QWEN], expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_tokens": 7, "page_size": 1},
        {"chunk_tokens": 25, "page_size": 4, "prefix_cache": False},
        {"kernels": "torch", "chunk_tokens": 33, "page_size": 8},
    ],
)
def test_cold_warm_and_in_a_batch(model, options):
    path, prompts, expected = model
    driver = Driver(make_core(path, **options))
    for _ in range(2):
        assert answers(driver, prompts) == expected
    assert tiles(driver) == 3, "an image is one tile"
    for i, one in enumerate(prompts):
        send(driver, f"b{i}", one, store=False)
    driver.run()
    assert [driver.tokens[f"b{i}"] for i in range(len(prompts))] == expected


def test_a_prefix_that_ends_within_an_image(model):
    path, prompts, expected = model
    driver = Driver(make_core(path, page_size=1))
    cache, run = driver.core.cache, prompts[1][1].runs[0]
    for place in (run.start + 1, run.start + run.width + 2, run.stop - 1, run.stop, run.stop + 1):
        assert answers(driver, prompts[1:2]) == expected[1:2]
        cache.allocator.release(cache.tree.evict(cache.tree.num_evictable_pages - place))
        assert answers(driver, prompts[1:2]) == expected[1:2]


def test_evicted_and_retracted(model):
    path, prompts, expected = model
    longest = max(len(tokens) for tokens, _ in prompts)
    driver = Driver(make_core(path, pool_tokens=longest + NEW + 8, page_size=2))
    for i in (*range(len(prompts)), *range(len(prompts))):
        send(driver, f"r{len(driver.tokens)}", prompts[i])
        driver.step()
    driver.run()
    assert [*driver.tokens.values()] == expected * 2
