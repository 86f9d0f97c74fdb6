"""Resume points as what they share with pages: tiers, pins, breakpoints, holds, quotas, operators' views, reports."""

import random
from array import array
from collections import Counter

import pytest

from radix import Namespace
from radix.views import NodeView
from runtime.asks import ReasoningAsk
from runtime.calls import AddPin, FlushCache, GetCached, GetOutline, GetTree, ReadNode, RemovePin
from runtime.errors import InvalidRequest
from runtime.features.chunks.ask import ChunksAsk
from tests.runtime.engine.driver import call
from tests.runtime.execution.mixers.models import save_hybrid
from tests.runtime.features.hybrid.test_exact import NEW, STOP, Asking, conversation, is_greedy, some
from tests.runtime.features.tiers.engines import always, evict, loaded

__all__ = ["is_greedy"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_hybrid("Qwen3_5", tmp_path_factory.mktemp("hybrid"))


def nodes(driver: Asking) -> list[NodeView]:
    """The attached runs as operators see them."""
    every = call(driver.core, GetTree(None, None, 0, 999, 8)).nodes
    return [node for node in every if node.meta]


@pytest.mark.parametrize("tier", ["disk", "store"])
def test_a_restart_resumes_where_the_last_turn_ended(saved, is_greedy, tmp_path, tier):
    options = {"disk_cache": tmp_path / "disk"} if tier == "disk" else {"kv_store": f"dir:{tmp_path / 'store'}"}
    options |= {"page_size": 8, "kernels": "torch"}
    draw = random.Random(1)
    driver, prompt = Asking(saved, is_greedy, **options), [*some(draw, 150), *conversation(draw, 3)]
    answer = driver.ask(prompt)
    evict(driver.core)
    driver.core.close()
    turn = [
        *prompt,
        *answer[:-1],
        STOP,
        *some(draw, 9),
    ]  # as if the answer's last token, which is not computed, ended it
    for asked, least in ((prompt, len(prompt) - 2), (turn, len(prompt) + NEW - 1)):
        again = Asking(saved, is_greedy, **options)
        always(again.core)
        again.ask(asked)
        assert again.latest >= least
        assert 0 < loaded(again, "0")[tier] <= again.latest
        again.core.close()


def test_a_drain_counts_tokens_without_points(saved, is_greedy, tmp_path, caplog):
    driver = Asking(saved, is_greedy, page_size=8, disk_cache=tmp_path / "disk")
    driver.ask(some(random.Random(8), 133), 1)
    assert nodes(driver)
    with caplog.at_level("INFO", "ramet.engine"):
        driver.core.close()
    assert "the disk holds 128 of 128 cached tokens" in caplog.text.splitlines()[-1]


def test_a_pin_comes_back_with_its_point(saved, is_greedy, tmp_path):
    options = {"page_size": 8, "kernels": "torch", "disk_cache": tmp_path / "disk"}
    prefix = some(random.Random(12), 104)
    driver = Asking(saved, is_greedy, **options)
    call(driver.core, AddPin(array("i", prefix).tobytes()))
    driver.core.close()
    again = Asking(saved, is_greedy, **options)
    always(again.core)
    while not again.core.cache.pins.pins:
        again.step()
    assert again.core.counters["prefill_tokens"] == 0, "it is loaded, not computed"
    again.ask([*prefix, *some(random.Random(13), 9)])
    assert again.latest == 104
    again.core.close()


def test_a_pin_protects_the_point_behind_it(saved, is_greedy):
    draw = random.Random(2)
    driver, prefix = Asking(saved, is_greedy, page_size=8, pool_tokens=1024), some(draw, 101)
    (pin,) = call(driver.core, AddPin(array("i", prefix).tobytes()))
    assert pin.tokens == 96
    for _ in range(8):
        driver.ask(some(draw, 300))
    driver.ask([*prefix, *some(draw, 20)])
    assert driver.latest == 96
    assert call(driver.core, GetCached(None, Namespace(), array("i", prefix).tobytes())) == {"": 96}
    with pytest.raises(InvalidRequest, match="shorter than a page"):
        call(driver.core, AddPin(array("i", prefix[:7]).tobytes()))
    assert call(driver.core, RemovePin(pin.id))
    assert driver.core.cache.tree.num_pinned_pages == 0


def test_a_prefix_shorter_than_a_page_is_not_pinned(saved, is_greedy):
    driver = Asking(saved, is_greedy, page_size=8)
    with pytest.raises(InvalidRequest, match="shorter than a page"):
        call(driver.core, AddPin(array("i", [5] * 7).tobytes()))


def test_a_breakpoint_is_kept_to_the_token(saved, is_greedy):
    draw = random.Random(3)
    driver, prompt = Asking(saved, is_greedy, page_size=8, pool_tokens=1024), some(draw, 140)
    driver.ask(prompt, breakpoints=[(67, 300.0)], namespace=Namespace("a"))
    (place,) = driver.events["0"][0].usage.breakpoints
    assert (place.kept, place.reason) == (67, None)
    evict_all(driver)
    driver.ask([*prompt[:67], *some(draw, 30)], namespace=Namespace("a"))
    assert driver.latest == 67


def evict_all(driver: Asking) -> None:
    """Evict all that is not held."""
    cache = driver.core.cache
    cache.allocator.release(cache.tree.evict(cache.tree.num_pages - cache.holds.num_pages))


def test_points_of_earlier_turns_go_first_and_those_at_branches_stay(saved, is_greedy):
    draw = random.Random(4)
    driver, begin = Asking(saved, is_greedy, page_size=8), [*some(draw, 120), STOP]
    first = [*begin, *some(draw, 60)]
    answer = driver.ask(first)
    driver.ask([*begin, *some(draw, 50)])
    assert driver.latest == len(begin)
    driver.ask([*first, *answer, STOP, *some(draw, 60)])
    cost = driver.core.strategies.default.points.num_pages
    places = {node.meta["point"] for node in nodes(driver)}
    assert {len(begin), len(first) + NEW - 1} <= places
    cache = driver.core.cache
    cache.allocator.release(cache.tree.evict(1))
    cache.allocator.release(cache.tree.evict(1))
    gone = places - {node.meta["point"] for node in nodes(driver)}
    assert len(first) + NEW - 1 in gone
    assert len(begin) not in gone
    assert cost > 1


def test_operators_see_points_and_none_of_their_filling(saved, is_greedy):
    draw = random.Random(5)
    driver, prompt = Asking(saved, is_greedy, page_size=8), conversation(draw, 3)
    driver.ask(prompt)
    shown = nodes(driver)
    assert {node.meta["behind"] for node in shown} == {"", "prompt", "answer"}
    assert all(node.preview == b"" for node in shown)
    blocks = call(driver.core, GetOutline(99, 8)).blocks
    assert sum(block.meta is not None for block in blocks) == len(shown)
    places = [(block.start + block.tokens, block.attached) for block in blocks if block.attached]
    assert sorted(places) == sorted(Counter(node.meta["point"] // 8 * 8 for node in shown).items())
    read = call(driver.core, ReadNode(shown[0].id, shown[0].start))
    tokens = array("i", read).tolist()
    assert tokens == prompt[: len(tokens)]
    assert len(tokens) == shown[0].meta["point"]


def test_a_miss_names_the_nearest_point_and_one_that_was_lost(saved, is_greedy):
    draw = random.Random(6)
    driver, prompt = Asking(saved, is_greedy, page_size=8), [*some(draw, 100), STOP, *some(draw, 90)]
    driver.ask(prompt, explain=True)
    driver.ask([*prompt[:150], *some(draw, 9)], explain=True)
    told = driver.events["1"][0].lookup
    assert (told.found, told.point, told.lost) == (150, 101, None)
    for node in [node for node in driver.core.cache.tree.nodes() if node.is_attached and node.meta.tokens == 101]:
        driver.core.cache.drop(node)
    driver.ask([*prompt[:140], *some(draw, 9)], explain=True)
    told = driver.events["2"][0].lookup
    assert (told.point, told.lost, told.why) == (0, 101, "flush")


def test_a_hold_holds_the_point_too(saved, is_greedy):
    draw = random.Random(7)
    driver = Asking(saved, is_greedy, page_size=8, pool_tokens=2048, hold_time="0:600")
    prompt = some(draw, 100)
    answer = driver.ask(prompt, hold_s=300.0)
    for _ in range(9):
        driver.ask(some(draw, 300))
    driver.ask([*prompt, *answer, *some(draw, 5)])
    assert driver.latest == len(prompt) + NEW - 1


def test_other_methods_are_refused(saved, is_greedy):
    driver = Asking(saved, is_greedy)
    for ask in (ChunksAsk([]), ChunksAsk("pie", []), ReasoningAsk()):
        with pytest.raises(InvalidRequest, match="for this model"):
            driver.core.strategies.serving(ask)
    call(driver.core, FlushCache())
