"""Fast-dLLM's caches and parallel decoding in the engine, alone and with BiCache, against plain readings."""

import random

import pytest

from tests.runtime.features.diffusion.bicache.driver import DenoiseDriver, make_core
from tests.runtime.features.diffusion.bicache.models import EOS
from tests.runtime.features.diffusion.bicache.reference import PlainBiCache, llada

draw = random.Random(13)
PROMPTS = [[draw.randrange(EOS) for _ in range(n)] for n in (33, 50)]


def settings(cache):
    # Dream's and LLaDA's models alike, so that the shift by one meets every row selection.
    return {"gen_length": 32, "steps": 16, "block_length": 8, "algorithm": "low_confidence", "cache": cache}


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_true_fast_dllm(any_dir, any_plain, cache, kernels):
    driver = DenoiseDriver(make_core(any_dir, kernels=kernels))
    for prompt in PROMPTS:
        wanted = llada(PlainBiCache(any_plain, 0, 0, 1, cache), prompt, 32, 16, 8)
        assert driver.one(prompt, **settings(cache)) == wanted
        assert wanted != llada(any_plain, prompt, 32, 16, 8), "the caches are approximate"


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize(("depth", "interval"), [(0, 1), (1, 1), (2, 1), (2, 6), (4, 6)])
def test_with_bicache(any_dir, any_plain, cache, depth, interval):
    driver = DenoiseDriver(make_core(any_dir))
    prefix = {"prefix_tokens": 32, "depth": depth, "refresh_interval": interval}
    # Where no layer is left to refresh, the plain reading's refreshes change nothing.
    wanted = llada(PlainBiCache(any_plain, 32, depth, interval, cache), PROMPTS[-1], 32, 16, 8)
    assert driver.one(PROMPTS[-1], **settings(cache), **prefix) == wanted
    refreshes = driver.report(driver.last())["refreshes"]
    assert refreshes == (0 if depth == any_plain.layers else 4 if interval == 1 else 2)
    if depth <= 1 and interval == 1:
        assert wanted == llada(PlainBiCache(any_plain, 0, 0, 1, cache), PROMPTS[-1], 32, 16, 8)


def test_parallel_decoding_by_threshold(any_dir, any_plain):
    driver = DenoiseDriver(make_core(any_dir))
    for threshold in (0.05, 0.3, 0.9):
        for prompt in PROMPTS:
            wanted = llada(any_plain, prompt, 32, 32, 8, threshold)
            given = settings("none") | {"steps": 32}
            assert driver.one(prompt, **given, threshold=threshold) == wanted
    steps = [driver.report(rid)["denoise_steps"] for rid in driver.tokens]
    assert steps[0] < steps[2] < steps[4] <= 32


def test_rows_that_are_computed(deep_dir):
    """A step within a block computes the block alone, or the block and what follows it."""
    for cache, rows in (("prefix", [65, 32, 32, 32, 57 - 33]), ("dual", [65, 8, 8, 8, 8])):
        driver = DenoiseDriver(make_core(deep_dir))
        given = settings(cache) | {"steps": 16}
        driver.denoise("r", PROMPTS[0], **given)
        seen = []
        run = driver.core.executor.run
        driver.core.executor.run = lambda batch, seen=seen, run=run: (seen.append(len(batch.tokens)), run(batch))[1]
        driver.run()
        assert seen[:4] == rows[:4]
        assert seen[4] == 65, "the next block begins with a full pass"
        assert seen[5] == rows[4]
