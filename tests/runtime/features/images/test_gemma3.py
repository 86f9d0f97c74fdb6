"""Gemma 3: rows of an image see each other, so neither a step nor a match may end among them."""

import pytest

from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.features.images.prompts import (
    OPTIONS,
    answers,
    answers_of_a_batch,
    asked_of,
    check_evicted_and_retracted,
    send,
)
from tests.runtime.features.images.seeing import WholeReference, save_seeing


@pytest.fixture(scope="module")
def gemma3(default_model_dir, tmp_path_factory):
    path = save_seeing(tmp_path_factory.mktemp("seeing") / "tiny-gemma3", default_model_dir, "gemma3")
    return asked_of(path, WholeReference(path))


def evict(driver: Driver, kept: int = 0) -> None:
    """Evict what the tree has behind its first `kept` tokens, in whole pages; the states of images stay."""
    cache = driver.core.cache
    cache.allocator.release(cache.tree.evict(cache.tree.num_evictable_pages - kept // cache.page_size))


@pytest.mark.parametrize("options", OPTIONS)
def test_gemma3(gemma3, options):
    """Rows of an image see each other, so a step computes all of them, in layers with a window, too."""
    path, prompts, expected = gemma3
    driver = Driver(make_core(path, **options))
    for _ in range(2):
        assert answers(driver, prompts) == expected
    evict(driver)
    assert answers_of_a_batch(driver, prompts) == expected


@pytest.mark.parametrize("has_disk", [False, True], ids=["with_windows_apart", "plain"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_match_ends_before_rows_that_see_each_other(gemma3, tmp_path, has_disk, page_size):
    """The tree has lost what comes behind a place within an image, or at one of its ends."""
    path, prompts, expected = gemma3
    _, asked = prompts[1]
    start, stop = asked.runs[1].start, asked.runs[1].stop
    options = {"disk_cache": str(tmp_path / "kv")} if has_disk else {}
    driver = Driver(make_core(path, page_size=page_size, **options))
    found = {}
    for place in (start, start + 5, stop - 1, stop, stop + 1):
        evict(driver)
        assert answers(driver, prompts[1:2]) == expected[1:2]
        evict(driver, place)
        assert answers(driver, prompts[1:2]) == expected[1:2]
        found[place] = driver.cached(f"r{len(driver.tokens) - 1}")
    whole = {place: place // page_size * page_size for place in found}
    assert found == {place: start if start < end < stop else end for place, end in whole.items()}


@pytest.mark.parametrize("options", [{"chunk_tokens": 9, "page_size": 1}, {"chunk_tokens": 9, "page_size": 4}, {}])
def test_equal_images_at_the_same_time(gemma3, options):
    """Who waits for rows that another request computes waits for all that see each other."""
    path, prompts, expected = gemma3
    driver = Driver(make_core(path, **options))
    for i in (1, 1, 0, 2, 1):
        send(driver, f"{len(driver.tokens)}", prompts[i])
        driver.step()
    driver.run()
    assert [*driver.tokens.values()] == [expected[i] for i in (1, 1, 0, 2, 1)]
    assert driver.cached("1") > prompts[1][1].runs[1].stop - 16


def test_gemma3_evicted_and_retracted(gemma3):
    check_evicted_and_retracted(gemma3)


def test_a_step_that_fails_for_memory_does_not_cut_an_image(gemma3):
    path, prompts, expected = gemma3
    driver = Driver(make_core(path))
    assert answers(driver, prompts[1:2]) == expected[1:2]
    evict(driver)  # but not the states
    send(driver, "r", prompts[1])
    work = driver.core.scheduler.schedule()
    lease, sizes = driver.requests["r"].lease, [work[0].count]
    while lease.shrink(work[0]):
        sizes.append(work[0].count)
    ends = [run.stop for run in prompts[1][1].runs]
    assert len(sizes) > 2
    assert not any(end - 16 < size < end for size in sizes for end in ends)
    driver.abort("r")
