"""Depth and interval by measured divergence: what is measured, what follows from it, its exact limits; drift."""

from __future__ import annotations

import json

import numpy as np
import pytest

from runtime.diffusion import decoding
from runtime.reuse.bicache import plan
from runtime.reuse.bicache.drift import num_near_layers
from runtime.reuse.bicache.measured import Ladder, Ledger
from tests.runtime.reuse.bicache.driver import DenoiseDriver, make_core
from tests.runtime.reuse.bicache.reference import PlainModel, llada
from tests.runtime.reuse.bicache.test_bicache import PROMPTS

SETTING = {"gen_length": 24, "steps": 24, "block_length": 24, "algorithm": "low_confidence", "prefix_tokens": 48}
MODEL = {"model_type": "llada", "num_layers": 6, "hidden_size": 48, "vocab_size": 300}


@pytest.fixture
def make(deep_dir, tmp_path):
    """Drivers of a model whose table says four layers and every third step."""
    table = {"model": MODEL, "depths": {"0": 4}, "refresh_interval": 3}
    (tmp_path / "table.json").write_text(json.dumps(table))
    return lambda **more: DenoiseDriver(make_core(deep_dir, depth_table=tmp_path / "table.json", **more))


@pytest.fixture
def exact(deep_dir):
    model = PlainModel(deep_dir)
    return [llada(model, prompt, 24, 24, 24) for prompt in PROMPTS]


def ledger(driver):
    (node,) = driver.core.cache.tree.nodes()
    (found,) = node.meta.measured._ledgers.values()
    return found


# -- the choice ----------------------------------------------------------------------------------------------


def test_a_rung_is_chosen_once_it_was_measured_within_the_bound():
    ladder = Ladder()
    assert (ladder.choose(0.1, 8), ladder.trial(0.1, 8, 30)) == (8, 8), "the table's, before anything is known"
    ladder.note(8, 0.02)
    assert (ladder.choose(0.1, 8), ladder.trial(0.1, 8, 30)) == (8, 16)
    ladder.note(16, 0.5)
    assert (ladder.choose(0.1, 8), ladder.trial(0.1, 8, 30)) == (8, 12)
    assert not ladder.is_settled(0.1, 30)
    ladder.note(12, 0.09)
    assert ladder.choose(0.1, 8) == 12
    assert ladder.is_settled(0.1, 30), "16 is near enough"
    assert ladder.trial(0.1, 8, 30) == 12, "it is measured again"
    ladder.note(12, 0.2)
    assert ladder.choose(0.1, 8) == 8, "the mean exceeds the bound now"
    assert ladder.choose(0.01, 8) == 1, "nothing was measured within this bound"
    assert ladder.choose(0, 8) == 1
    assert ladder.choose(1, 8) == 16


def test_rungs_end_at_the_top():
    ladder = Ladder()
    assert ladder.trial(9, 1, 6) == 2, "the first rung is exact, so the next one is tried"
    for rung in (2, 4, 6):
        assert ladder.trial(9, 1, 6) == rung
        assert not ladder.is_settled(9, 6)
        ladder.note(rung, 0.5)
    assert ladder.is_settled(9, 6)
    assert ladder.trial(9, 1, 6) == 6


def test_rungs_that_hardly_differ_are_not_told_apart():
    ladder = Ladder(grain=4)
    ladder.note(8, 0.5)
    assert (ladder.trial(0.1, 8, 30), ladder.is_settled(0.1, 30)) == (4, False)
    ladder.note(4, 0.4)
    assert (ladder.choose(0.1, 8), ladder.is_settled(0.1, 30)) == (1, True), "the exact rung is as good as 2 and 3"
    assert ladder.trial(0.1, 8, 30) == 2, "which are tried when it is measured again"
    ladder.note(2, 0.02)
    assert (ladder.choose(0.1, 8), ladder.trial(0.1, 8, 30)) == (2, 3)


def test_a_likely_rung_is_tried_next_and_believed_no_sooner():
    ladder = Ladder(grain=4)
    ladder.reach = 18
    assert ladder.trial(0.1, 8, 30) == 8
    ladder.note(8, 0.02)
    assert (ladder.choose(0.1, 8), ladder.trial(0.1, 8, 30), ladder.is_settled(0.1, 30)) == (8, 18, False)
    ladder.note(18, 0.03)
    assert (ladder.choose(0.1, 8), ladder.is_settled(0.1, 30)) == (18, True)
    assert ladder.trial(0.1, 8, 30) == 30, "what is beyond is tried when it is measured again"
    ladder = Ladder(grain=4)
    ladder.reach = 18
    ladder.note(8, 0.02)
    ladder.note(18, 0.5)
    assert (ladder.choose(0.1, 8), ladder.trial(0.1, 8, 30), ladder.is_settled(0.1, 30)) == (8, 13, False)
    ladder = Ladder(grain=4)
    ladder.reach = 18
    ladder.note(8, 0.5)
    assert ladder.trial(0.1, 8, 30) == 4, "what was measured counts for more"


def test_settled_prefixes_are_measured_now_and_then():
    found = Ledger()
    assert found.wants(found.depth, 0.1, 6)
    assert not found.wants(found.interval, 0.1, 1), "nothing is left to the measurements"
    found.depth.note(6, 0.01)
    wanted = []
    for found.requests in range(33):
        wanted.append(found.wants(found.depth, 0.1, 6))
    assert [i for i, wants in enumerate(wanted) if wants] == [0, 16, 32]
    found = Ledger(requests=15)
    assert found.wants(found.depth, 0.1, 6)
    found.requests += 2
    assert not found.wants(found.depth, 0.1, 6), "what sixteen requests could not settle is tried no more often"


# -- the limits ----------------------------------------------------------------------------------------------


def test_a_bound_of_nothing_is_exact_and_measures_nothing(make, exact):
    driver = make(depth_bound=0)
    assert [driver.one(prompt, **SETTING) for prompt in PROMPTS] == exact
    report = driver.report(driver.last())
    assert (report["shallow_depth"], report["refresh_interval"], report["refreshes"]) == (1, 1, 24)
    assert report["depth_divergence"] is report["refresh_divergence"] is None
    assert driver.core.counters["divergences"] == 0


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_under_fast_dllm_a_bound_of_nothing_is_fast_dllm(make, cache):
    same = {**SETTING, "cache": cache, "block_length": 8}
    wanted = make().one(PROMPTS[1], **same, reuse=False)
    assert make(depth_bound=0).one(PROMPTS[1], **same) == wanted
    assert make().one(PROMPTS[1], **same) != wanted, "the table's depth"


def test_a_bound_that_nothing_meets_leads_to_the_exact_model(make, exact):
    """The table's depth and interval are tried, found wanting, and left."""
    driver = make()
    for _ in range(6):
        driver.one(PROMPTS[1], **SETTING, depth_bound=1e-9)
    report = driver.report(driver.last())
    assert (report["shallow_depth"], report["refresh_interval"]) == (1, 1)
    assert driver.one(PROMPTS[1], **SETTING, depth_bound=1e-9) == exact[1]
    counters = driver.core.counters
    assert counters["divergences"] == counters["divergences_exceeded"] > 0


def test_a_bound_that_all_meet_leads_to_all_layers(make):
    driver = make(depth_bound=1e4)
    for _ in range(4):
        driver.one(PROMPTS[1], **SETTING)
    found = ledger(driver)
    assert found.depth.choose(1e4, 1) == 4 > found.depth.reach > 0, "beyond the layers that are near"
    found.requests = 16
    driver.one(PROMPTS[1], **SETTING)
    assert found.depth.choose(1e4, 1) == 6, "it is tried when the prefix is measured again"
    assert driver.report(driver.last())["shallow_depth"] == 6
    assert driver.core.counters["divergences_exceeded"] == 0
    wanted = make().one(PROMPTS[1], **SETTING, depth=6)
    assert driver.one(PROMPTS[1], **SETTING) == wanted, "reuse of all layers"


def test_a_request_that_says_depth_and_interval_has_them(make):
    driver = make(depth_bound=1e4)
    for _ in range(2):
        got = driver.one(PROMPTS[1], **SETTING, depth=3, refresh_interval=5)
    assert got == make().one(PROMPTS[1], **SETTING, depth=3, refresh_interval=5)
    assert driver.core.counters["divergences"] == 0
    driver.one(PROMPTS[1], **SETTING, refresh_interval=5)
    assert driver.report(driver.last())["refresh_interval"] == 5
    found = ledger(driver)
    assert found.depth.tallies
    assert not found.interval.tallies


def test_layers_in_which_cached_values_are_near(make):
    """The values of each layer, in the slots of a prefix, part by a known share of their norm."""
    pool = make().core.cache.pool
    fresh, cached = np.arange(8), np.arange(8, 16)
    pool.v[:, :16] = 1.0
    assert num_near_layers(pool, fresh, cached) == 6
    pool.v[4, 8:16] = 1.29
    pool.v[2, 8] = 1.5
    assert num_near_layers(pool, fresh, cached) == 6
    pool.v[4, 8:16] = 1.31
    assert num_near_layers(pool, fresh, cached) == 4
    pool.v[0, 8:16] = float("nan")
    assert num_near_layers(pool, fresh, cached) == 0


# -- what is measured ----------------------------------------------------------------------------------------


def run_at(driver, monkeypatch, steps, **more):
    """Tokens and the logits of each step, with refreshes at these steps."""
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_is_due", lambda share, canvas: canvas.num_steps in steps)
        commit = decoding.Canvas.commit
        patch.setattr(decoding.Canvas, "commit", lambda c, logits: (seen.append(logits.clone()), commit(c, logits))[1])
        return driver.one(PROMPTS[1], **SETTING, **more), seen


@pytest.mark.parametrize("native", [False, True])
def test_an_interval_is_measured_without_changing_what_is_served(make, monkeypatch, native):
    """The rows that were compared at a refresh are those of a step without it; the answer is that of the refreshes."""
    driver, compared = make(native_kernels=native), []
    with monkeypatch.context() as patch:
        true = decoding.divergence
        patch.setattr(
            decoding, "divergence", lambda p, q, mask: (compared.append((p.clone(), q.clone())), true(p, q, mask))[1]
        )
        tokens = driver.one(PROMPTS[1], **SETTING, depth=3, depth_bound=1e3)
    assert driver.report(driver.last())["refreshes"] == 4, "at steps 0, 3, 3 + 6 and 9 + 12"
    assert sorted(ledger(driver).interval.tallies) == [3, 6, 12]
    plain = make(native_kernels=native)
    served, logits = run_at(plain, monkeypatch, (0, 3, 9, 21), depth=3)
    assert served == tokens
    for (fresh, stale), step in zip(compared, (3, 9, 21), strict=True):
        assert (fresh - logits[step]).abs().max() < 1e-3
        without = run_at(plain, monkeypatch, {0, 3, 9, 21} - {step}, depth=3)[1][step]
        assert (stale - without).abs().max() < 1e-3 < (stale - fresh).abs().max()


def test_what_is_settled_is_not_measured_beside_what_is_not(make):
    """Each takes a pass of its own."""
    driver = make()
    for _ in range(3):
        driver.one(PROMPTS[1], **SETTING, depth_bound=1e4)
    found = ledger(driver)
    assert found.depth.is_settled(1e4, 6)
    assert sum(tally.count for tally in found.depth.tallies.values()) == 1
    assert [tally.count for tally in found.interval.tallies.values()] == [1, 1, 1], "3, 6, 12, in one request"


def test_a_depth_is_measured_against_no_reuse(make, monkeypatch):
    driver, compared = make(), []
    with monkeypatch.context() as patch:
        true = decoding.divergence
        patch.setattr(
            decoding, "divergence", lambda p, q, mask: (compared.append((p.clone(), q.clone())), true(p, q, mask))[1]
        )
        driver.one(PROMPTS[1], **SETTING, refresh_interval=24, depth_bound=1e4)
    assert sorted(ledger(driver).depth.tallies) == [4]
    ((without, reusing),) = compared
    plain = make()
    exact_logits = run_at(plain, monkeypatch, (), reuse=False)[1][0]
    assert (without - exact_logits).abs().max() < 1e-3
    table = run_at(plain, monkeypatch, (0,), depth=4)[1][0]
    assert (reusing - table).abs().max() < 1e-3 < (reusing - without).abs().max()


def test_measuring_requests_share_steps_end_early_and_leak_nothing(make):
    driver = make(depth_bound=0.02, pool_tokens=512, boundary_memory=0)
    for i in range(10):
        more = {"cache": "dual", "block_length": 8} if i % 3 == 2 else {}
        driver.denoise(str(i), PROMPTS[i % 3], **{**SETTING, **more})
        for _ in range(i % 4):
            driver.step()
        if i % 5 == 4:
            driver.core.abort(str(i))
    driver.run()
    assert driver.core.counters["divergences"] > 0
    driver.flush()
    assert driver.core.cache.allocator.num_free == driver.core.cache.pool.num_pages


def test_operators_see_what_was_measured(make):
    driver = make(depth_bound=1e4)
    driver.one(PROMPTS[0], **SETTING)
    (node,) = driver.core.cache.tree.nodes()
    shown = node.meta.describe()["measured"]
    assert list(shown) == ["60"], "48 of 73 positions"
    assert set(shown["60"]) == {"depth", "interval"}
    assert shown["60"]["depth"]["4"] > 0
    report = driver.report(driver.last())
    assert report["divergence_bound"] == 1e4
    assert report["depth_divergence"] >= shown["60"]["depth"]["4"] - 1e-4
    assert driver.core.strategy.info.depth_bound == 1e4


# -- drift ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threshold", "refreshes"), [(1e-9, 12), (1e9, 1)])
def test_drift_refreshes_as_soon_as_it_is_seen_or_never(make, monkeypatch, threshold, refreshes):
    """It is seen after the step behind a refresh, so that the next one refreshes."""
    driver = make()
    got = driver.one(PROMPTS[1], **SETTING, depth=3, refresh="drift", drift_threshold=threshold)
    assert driver.report(driver.last())["refreshes"] == refreshes
    assert got == run_at(driver, monkeypatch, range(0, 24, 24 // refreshes), depth=3)[0]


def test_drift_refreshes_between_these_when_rows_have_moved(make):
    driver = make()
    found = []
    for threshold in (0.1, 0.5, 5.0):
        driver.one(PROMPTS[2], **SETTING, depth=2, refresh="drift", drift_threshold=threshold)
        found.append(driver.report(driver.last())["refreshes"])
    assert 12 >= found[0] > found[1] >= found[2] >= 1


def test_drift_goes_on_where_a_measurement_changes_the_depth(make):
    driver = make()
    for found in (4, 6):
        driver.one(PROMPTS[2], **SETTING, depth_bound=1e4, refresh="drift", drift_threshold=0.1)
        assert driver.report(driver.last())["shallow_depth"] == found
        ledger(driver).requests = 16


def test_without_rows_to_watch_the_interval_counts(make):
    driver = make()
    prompt = PROMPTS[0][:48]
    got = driver.one(prompt, **SETTING, depth=3, refresh="drift", drift_threshold=1e-9, refresh_interval=6)
    assert driver.report(driver.last())["refreshes"] == 4
    assert got == driver.one(prompt, **SETTING, depth=3, refresh_interval=6)
