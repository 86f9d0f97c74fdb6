"""Pools that are too small, evictions, aborts, tenants and damaged pages in the midst of fusion."""

from __future__ import annotations

import random

import pytest
import torch

from radix import Namespace
from tests.runtime.reuse.fusion.driver import FusionDriver, build, check
from tests.runtime.reuse.fusion.reference import METHODS
from tests.runtime.reuse.modules.plain import draw_tokens


@pytest.mark.parametrize("method", METHODS)
def test_a_pool_of_the_least_size_suffices(tiny_dir, reference, method):
    """Whatever is accepted comes to its end, also beside another one like it."""
    accepted = 0
    for pages in range(7, 28, 3):
        draw = random.Random(28)
        driver = FusionDriver(tiny_dir, page_size=16, pool_tokens=16 * pages)
        for i in range(2):
            texts = [draw_tokens(draw, 40), draw_tokens(draw, 30)]
            driver.fuse(f"{i}", build(draw, texts, 20, method=method), 30)
        accepted += len(driver.asks)
        driver.run()
        check(driver, reference, 30)
    assert 2 <= accepted < 14, "it depends on the size"


@pytest.mark.parametrize("method", METHODS)
def test_the_request_that_encodes_for_others_is_aborted(tiny_dir, reference, method):
    for steps in range(1, 9, 2):
        draw = random.Random(29)
        driver = FusionDriver(tiny_dir, page_size=16, step_tokens=20)
        texts = [draw_tokens(draw, 50), draw_tokens(draw, 20)]
        for rid, several in (("first", texts), ("second", texts[::-1]), ("third", texts)):
            draw = random.Random(30)
            driver.fuse(rid, build(draw, several, 9, method=method))
        for _ in range(steps):
            driver.step()
        driver.abort("first")
        driver.run()
        del driver.asks["first"]
        check(driver, reference)


@pytest.mark.parametrize("method", METHODS)
def test_a_pool_that_is_too_small_retracts(tiny_dir, reference, method):
    """In the midst of answers; the rows that were chosen stay the same."""
    draw = random.Random(14)
    driver = FusionDriver(tiny_dir, page_size=1, pool_tokens=230, max_running=16)
    for i in range(5):
        texts, granularity = [draw_tokens(draw, 20), draw_tokens(draw, 12)], ("token", "page")[i % 2]
        driver.fuse(f"{i}", build(draw, texts, 2, 4, method=method, granularity=granularity), 40, logprobs=0)
    chosen = {}

    def between(step: int) -> None:
        for rid in driver.requests:
            if driver.tokens[rid]:
                chosen.setdefault(rid, driver.selected(rid))

    driver.run(between)
    assert driver.core.scheduler.num_retracted > 0
    check(driver, reference, 40)
    assert chosen == {rid: driver.selected(rid) for rid in driver.requests}
    driver.flush()
    assert driver.core.cache.tree.num_pages == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_request_retracted_at_any_step_ends_right(tiny_dir, reference, method):
    """While chunks are encoded, while the method looks, while rows are fused, and behind."""
    draw = random.Random(26)
    driver = FusionDriver(tiny_dir, page_size=4, step_tokens=24)
    for step in range(1, 14):
        texts, granularity = [draw_tokens(draw, 30), draw_tokens(draw, 14)], ("token", "page")[step % 2]
        driver.fuse(f"{step}", build(draw, texts, 9, 6, method=method, granularity=granularity), logprobs=0)
        for _ in range(step):
            driver.step()
        if driver.core.scheduler.running:
            driver.core.scheduler._retract(driver.requests[f"{step}"])
            driver.core.cache.check([])
        driver.run()
    assert driver.core.scheduler.num_retracted > 5
    check(driver, reference)


@pytest.mark.parametrize("method", METHODS)
def test_chunks_in_the_midst_of_a_document_are_evicted(tiny_dir, reference, method):
    draw = random.Random(15)
    one = build(draw, [draw_tokens(draw, 96), draw_tokens(draw, 64)], 16, method=method)
    driver = FusionDriver(tiny_dir, page_size=16)
    driver.fuse("before", one, logprobs=0)
    driver.run()
    tree = driver.core.cache.tree
    nodes = sorted((n for n in tree.nodes() if n.namespace.entry), key=lambda n: n.namespace.entry)
    for node in nodes[::2]:
        driver.core.cache.allocator.release(
            tree._evict(len(node.pages), "room", iter([(node, len(node.pages))]).__next__)
        )
    driver.fuse("after", one, logprobs=0)
    driver.run()
    check(driver, reference)
    assert driver.selected("before") == driver.selected("after")
    assert 0 < driver.events["after"][-1].cached_tokens < 160 + 16


@pytest.mark.parametrize("method", METHODS)
def test_an_abort_at_any_step_loses_nothing(tiny_dir, reference, method):
    draw = random.Random(16)
    texts = [draw_tokens(draw, 40), draw_tokens(draw, 40)]
    driver = FusionDriver(tiny_dir, page_size=16, step_tokens=24)
    for steps in range(1, 17):
        one = build(draw, texts if steps % 2 else [draw_tokens(draw, 40)], 17, method=method)
        driver.fuse(f"{steps}", one, 3)
        for _ in range(steps):
            if driver.core.busy:
                driver.step()
        if driver.core.busy:
            driver.abort(f"{steps}")
        driver.run()
    check(driver, reference, None)
    assert any(len(driver.tokens[rid]) == 3 for rid in driver.asks), "the last ones come to their ends"


def test_without_a_cache_every_request_encodes_for_itself(tiny_dir, reference):
    draw = random.Random(17)
    driver = FusionDriver(tiny_dir, prefix_cache=False)
    texts = [draw_tokens(draw, 40), draw_tokens(draw, 20)]
    for method in METHODS:
        driver.fuse(method, build(draw, texts, 9, method=method))
    driver.run()
    check(driver, reference)
    assert {driver.events[method][-1].cached_tokens for method in METHODS} == {0}
    assert driver.core.cache.tree.num_pages == 0


def test_documents_of_different_tenants_never_meet(tiny_dir, reference):
    """Nor does one tenant get the rows that were chosen for another: it looks for itself."""
    draw = random.Random(18)
    one = build(draw, [draw_tokens(draw, 40)], 0, method="prophetkv")
    driver = FusionDriver(tiny_dir, page_size=16)
    costs = []
    for i, namespace in enumerate([Namespace("a"), Namespace("b"), Namespace("a", "salt"), Namespace("a")]):
        before = driver.row_layers
        driver.fuse(f"{i}", one, namespace=namespace)
        driver.run()
        costs.append(driver.row_layers - before)
    check(driver, reference)
    assert [driver.events[f"{i}"][-1].cached_tokens for i in range(3)] == [0, 0, 0]
    assert driver.events["3"][-1].cached_tokens >= 40
    assert costs[0] == costs[1] == costs[2] > costs[3]
    assert {namespace.tenant for namespace, _ in driver.core.cache.tree.roots()} == {"a", "b"}


def test_a_tenant_over_its_quota_is_served(tiny_dir, reference):
    draw = random.Random(19)
    driver = FusionDriver(tiny_dir, tenant_quota=2, page_size=16)
    for i, method in enumerate(METHODS):
        one = build(draw, [draw_tokens(draw, 50)], 20, method=method)
        driver.fuse(f"{i}", one, namespace=Namespace("a"))
        driver.run()
    check(driver, reference)
    assert driver.core.cache.tree.num_pages <= 2


@pytest.mark.parametrize("method", METHODS)
def test_bad_numbers_take_the_documents_with_them(tiny_dir, reference, method):
    draw = random.Random(20)
    one = build(draw, [draw_tokens(draw, 40)], 3, method=method)
    driver = FusionDriver(tiny_dir, page_size=16)
    driver.fuse("a", one)
    driver.run()
    for node in driver.core.cache.tree.nodes():
        for page in node.pages:
            driver.core.executor.pool.v[:, page * 16] = torch.nan
    driver.fuse("bad", one)
    driver.run()
    assert "finite" in driver.finish["bad"].message
    del driver.asks["bad"]
    driver.fuse("again", one)
    driver.run()
    check(driver, reference)


def test_choices_are_forgotten_when_they_have_too_many_rows(tiny_dir, reference, monkeypatch):
    """The oldest conversation first; its rows are chosen anew, and are the same."""
    monkeypatch.setattr("runtime.reuse.fusion.choices.MOST_ROWS", 60)
    draw, driver = random.Random(41), FusionDriver(tiny_dir, page_size=16)
    choices = driver.core.strategies["fusion"]._choices
    asks = [build(draw, [draw_tokens(draw, 80)], 16, 9, method="a3", ratio=0.3) for _ in range(4)]
    for i, ask in enumerate([*asks, asks[0], asks[3]]):
        driver.fuse(f"{i}", ask)
        driver.run()
        assert choices.num_rows == sum(len(chosen) + 1 for turns in choices._known.values() for _, _, chosen in turns)
        assert 0 < choices.num_rows <= 60
    assert driver.selected("4") == driver.selected("0")
    check(driver, reference)
