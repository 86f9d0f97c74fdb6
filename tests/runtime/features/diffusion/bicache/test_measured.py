"""Depth by measured divergence: the measurements, the chosen depth, its exact limits; refresh on drift."""

import json

import numpy as np
import pytest

from runtime.features.diffusion import decoding
from runtime.features.diffusion.bicache import plan
from runtime.features.diffusion.bicache.drift import num_near_layers
from runtime.features.diffusion.bicache.measured import MeasuredDepths
from runtime.features.diffusion.canvas import BidirectionalCanvas
from tests.runtime.features.diffusion.bicache.driver import DenoiseDriver, make_core
from tests.runtime.features.diffusion.bicache.reference import PlainModel, llada
from tests.runtime.features.diffusion.bicache.test_bicache import PROMPTS

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


def measured(driver):
    (node,) = driver.core.cache.tree.nodes()
    (found,) = node.meta.measured._depths.values()
    return found


def noted(*notes, reach=0):
    depths = MeasuredDepths()
    depths.reach = reach
    for depth, nats in notes:
        depths.note(depth, nats)
    return depths


# -- the choice ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("notes", "reach", "chosen", "trial", "is_settled"),
    [
        ([], 0, 8, 8, False),  # the table's, before anything is known
        ([(8, 0.02)], 0, 8, 16, False),
        ([(8, 0.02), (16, 0.5)], 0, 8, 12, False),
        ([(8, 0.02), (16, 0.5), (12, 0.09)], 0, 12, 12, True),  # 16 is near enough; 12 is measured again
        ([(8, 0.02), (12, 0.09), (12, 0.2)], 0, 8, 8, True),  # the mean exceeds the bound
        ([(8, 0.5)], 0, 1, 4, True),  # 1 is as good as 2 to 8, until the prefix is measured again
        ([], 18, 8, 8, False),
        ([(8, 0.02)], 18, 8, 18, False),  # a likely depth is tried next, and believed no sooner
        ([(8, 0.02), (18, 0.03)], 18, 18, 30, True),  # greater ones are tried when it is measured again
        ([(8, 0.02), (18, 0.5)], 18, 8, 13, False),
        ([(8, 0.5)], 18, 1, 4, True),  # measurements count for more
        ([(24, 0.01), (30, 0.05)], 0, 30, 30, True),  # all layers
    ],
)
def test_a_depth_is_chosen_once_it_was_measured_within_the_bound(notes, reach, chosen, trial, is_settled):
    depths = noted(*notes, reach=reach)
    assert (depths.choose(0.1, 8), depths.trial(0.1, 8, 30), depths.is_settled(0.1, 30)) == (chosen, trial, is_settled)


def test_bounds_without_a_measured_depth():
    depths = noted((8, 0.02), (16, 0.5))
    assert depths.choose(0.01, 8) == 1, "nothing was measured within this bound"
    assert depths.choose(0, 8) == 1
    assert depths.choose(1, 8) == 16
    assert noted().trial(9, 1, 6) == 2, "the first layer is exact, so the next one is tried"


def test_settled_prefixes_are_measured_now_and_then():
    found = noted()
    assert found.wants(0.1, 6)
    assert not found.wants(0.1, 1), "nothing is left to measure"
    found.note(6, 0.01)
    wanted = []
    for found.requests in range(33):
        wanted.append(found.wants(0.1, 6))
    assert [i for i, wants in enumerate(wanted) if wants] == [0, 16, 32]
    found = noted()
    found.requests = 15
    assert found.wants(0.1, 6)
    found.requests += 2
    assert not found.wants(0.1, 6), "an unsettled prefix is tried no more often after sixteen requests"


# -- the limits ----------------------------------------------------------------------------------------------


def test_a_bound_of_nothing_is_exact_and_measures_nothing(make, exact):
    driver = make(depth_bound=0)
    assert [driver.one(prompt, **SETTING) for prompt in PROMPTS] == exact
    report = driver.report(driver.last())
    assert (report["shallow_depth"], report["refresh_interval"], report["refreshes"]) == (1, 1, 24)
    assert report["depth_divergence"] is None
    assert driver.core.totals()["divergences"] == 0


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_under_fast_dllm_a_bound_of_nothing_is_fast_dllm(make, cache):
    same = {**SETTING, "cache": cache, "block_length": 8}
    wanted = make().one(PROMPTS[1], **same, reuse=False)
    assert make(depth_bound=0).one(PROMPTS[1], **same) == wanted
    assert make().one(PROMPTS[1], **same) != wanted, "the table's depth"


def test_a_bound_that_nothing_meets_leads_to_the_exact_model(make, exact):
    """The table's depth is tried, found wanting, and left."""
    driver, same = make(), {**SETTING, "depth_bound": 1e-9, "refresh_interval": 1}
    for _ in range(6):
        driver.one(PROMPTS[1], **same)
    assert driver.report(driver.last())["shallow_depth"] == 1
    assert driver.one(PROMPTS[1], **same) == exact[1]
    counters = driver.core.totals()
    assert counters["divergences"] == counters["divergences_exceeded"] > 0


def test_a_bound_that_all_meet_leads_to_all_layers(make):
    driver = make(depth_bound=1e4)
    for _ in range(4):
        driver.one(PROMPTS[1], **SETTING)
    found = measured(driver)
    assert found.choose(1e4, 1) == 4 > found.reach > 0, "beyond the layers that are near"
    found.requests = 16
    driver.one(PROMPTS[1], **SETTING)
    assert found.choose(1e4, 1) == 6, "it is tried when the prefix is measured again"
    assert driver.report(driver.last())["shallow_depth"] == 6
    assert driver.core.totals()["divergences_exceeded"] == 0
    wanted = make().one(PROMPTS[1], **SETTING, depth=6)
    assert driver.one(PROMPTS[1], **SETTING) == wanted, "reuse of all layers"


def test_a_request_that_says_depth_and_interval_has_them(make):
    driver = make(depth_bound=1e4)
    for _ in range(2):
        got = driver.one(PROMPTS[1], **SETTING, depth=3, refresh_interval=5)
    assert got == make().one(PROMPTS[1], **SETTING, depth=3, refresh_interval=5)
    assert driver.core.totals()["divergences"] == 0


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
        kind, choose = BidirectionalCanvas, BidirectionalCanvas.choose
        patch.setattr(kind, "choose", lambda c, logits: (seen.append(logits.clone()), choose(c, logits))[1])
        return driver.one(PROMPTS[1], **SETTING, **more), seen


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_depth_is_measured_against_no_reuse(make, monkeypatch, kernels):
    """The request is served from the exact rows, and goes on with the depth that was chosen."""
    driver, compared = make(kernels=kernels), []
    with monkeypatch.context() as patch:
        true = decoding.divergence
        patch.setattr(
            decoding, "divergence", lambda p, q, mask: (compared.append((p.clone(), q.clone())), true(p, q, mask))[1]
        )
        driver.one(PROMPTS[1], **SETTING, refresh_interval=24, depth_bound=1e4)
    assert [(depth, tally.count) for depth, tally in measured(driver).tallies.items()] == [(4, 1)]
    ((without, reusing),) = compared
    plain = make(kernels=kernels)
    exact_logits = run_at(plain, monkeypatch, (), reuse=False)[1][0]
    assert (without - exact_logits).abs().max() < 1e-3
    table = run_at(plain, monkeypatch, (0,), depth=4)[1][0]
    assert (reusing - table).abs().max() < 1e-3 < (reusing - without).abs().max()


def test_measuring_requests_share_steps_end_early_and_leak_nothing(make, monkeypatch):
    monkeypatch.setattr("runtime.features.diffusion.bicache.strategy._BOUNDARY_BYTES", 0)
    driver = make(depth_bound=0.02, pool_tokens=512)
    for i in range(10):
        more = {"cache": "dual", "block_length": 8} if i % 3 == 2 else {}
        more = SETTING | more
        driver.denoise(str(i), PROMPTS[i % 3], **more)
        for _ in range(i % 4):
            driver.step()
        if i % 5 == 4:
            driver.core.abort(str(i))
    driver.run()
    assert driver.core.totals()["divergences"] > 0
    driver.flush()
    assert driver.core.cache.allocator.num_free == driver.core.cache.pool.num_pages


def test_operators_see_what_was_measured(make):
    driver = make(depth_bound=1e4)
    driver.one(PROMPTS[0], **SETTING)
    (node,) = driver.core.cache.tree.nodes()
    shown = node.meta.describe()["measured"]
    assert list(shown) == ["60"], "48 of 73 positions"
    assert set(shown["60"]) == {"depth"}
    assert shown["60"]["depth"]["4"] > 0
    report = driver.report(driver.last())
    assert report["divergence_bound"] == 1e4
    assert report["depth_divergence"] >= shown["60"]["depth"]["4"] - 1e-4
    assert driver.core.strategies.default.info.depth_bound == 1e4


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
        measured(driver).requests = 16


def test_without_rows_to_watch_the_interval_counts(make):
    driver = make()
    prompt = PROMPTS[0][:48]
    got = driver.one(prompt, **SETTING, depth=3, refresh="drift", drift_threshold=1e-9, refresh_interval=6)
    assert driver.report(driver.last())["refreshes"] == 4
    assert got == driver.one(prompt, **SETTING, depth=3, refresh_interval=6)
