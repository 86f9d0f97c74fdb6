"""Attempts to break the engine of diffusion models."""

from __future__ import annotations

import random

import pytest

from tests.runtime.reuse.bicache.driver import DenoiseDriver, make_core
from tests.runtime.reuse.bicache.models import save_tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny("llada", tmp_path_factory.mktemp("d") / "llada")


def prompt_of(seed, count):
    draw = random.Random(seed)
    return [draw.randrange(290) for _ in range(count)]


def test_two_pins_of_the_same_prefix_at_once(path):
    core = make_core(path)
    driver = DenoiseDriver(core)
    tokens = prompt_of(1, 64)
    assert driver.pin(tokens, 1) is None
    assert driver.pin(tokens, 2) is None
    driver.run()
    replies = {number: driver.answer(number) for number in (1, 2)}
    assert all("pin" in replies[call] for call in (1, 2))


def test_a_pin_while_a_request_encodes_the_same_prefix(path):
    core = make_core(path)
    driver = DenoiseDriver(core)
    tokens = prompt_of(2, 64)
    driver.denoise("a", [*tokens, 1, 2], prefix_tokens=64, gen_length=8)
    assert driver.pin(tokens) is None
    driver.run()
    assert "pin" in driver.answer()


def test_a_pin_while_a_waiting_one_is_flushed_and_aborted(path):
    core = make_core(path)
    driver = DenoiseDriver(core)
    tokens = prompt_of(4, 64)
    driver.denoise("a", [*tokens, 1, 2], prefix_tokens=64, gen_length=8)
    assert driver.pin(tokens) is None
    driver.step()
    driver.abort("a")
    driver.flush()
    driver.run()
    assert "pin" in driver.answer()


@pytest.mark.parametrize("seed", range(5))
def test_lives(path, seed):
    """Guidance, declared prefixes, evictions, flushes, aborts, failing steps."""
    draw = random.Random(seed)
    core = make_core(path, page_size=draw.choice([4, 16]), pool_tokens=640, max_running=draw.choice([3, 8]))
    driver = DenoiseDriver(core)
    run = core.executor.run

    def flaky(batch):
        if draw.random() < 0.03:
            raise RuntimeError("no")
        return run(batch)

    core.executor.run = flaky
    roots = [prompt_of(50 + i, 64) for i in range(3)]
    rids, asked = [], {}
    plain = DenoiseDriver(make_core(path, prefix_cache=False))
    for i in range(40):
        root = draw.choice(roots)[: draw.choice([32, 48, 64])]
        prompt = [*root, *prompt_of(i, draw.randrange(1, 9))]
        fields = {"gen_length": draw.choice([4, 8])}
        if draw.random() < 0.6:
            fields["prefix_tokens"] = len(root)
        if draw.random() < 0.4:
            fields["depth"] = draw.randrange(0, 5)
        if draw.random() < 0.3:
            fields["cfg_scale"] = 1.5
        rids.append(str(i))
        asked[str(i)] = prompt, fields
        driver.denoise(str(i), prompt, **fields)
        if draw.random() < 0.2 and core.requests:
            driver.abort(draw.choice(list(core.requests)))
        if draw.random() < 0.1:
            driver.flush()
        for _ in range(draw.randrange(4)):
            driver.step()
    driver.run()
    assert set(driver.finish) == set(rids)
    for rid in [r for r in rids if driver.finish[r].type == "length" and asked[r][1].get("depth", 1) < 2]:
        prompt, fields = asked[rid]
        fields = {**fields, "refresh_interval": 1}
        if "depth" not in asked[rid][1]:  # exact: depth 1, always refreshed
            assert plain.one(prompt, **fields) == driver.tokens[rid]


def test_damaged_encodings_that_two_requests_read_leave_the_cache(path):
    core = make_core(path)
    driver = DenoiseDriver(core)
    tokens = prompt_of(8, 64)
    driver.denoise("a", [*tokens, 1, 2], prefix_tokens=64, gen_length=8)
    driver.denoise("b", [*tokens, 3, 4], prefix_tokens=64, gen_length=8)
    driver.step()
    core.cache.pool.k[:, :64] = float("nan")
    core.cache.pool.v[:, :64] = float("nan")
    driver.run()
    assert {f.type for f in driver.finish.values()} == {"error"}
    driver.denoise("c", [*tokens, 5, 6], prefix_tokens=64, gen_length=8)
    driver.run()
    assert driver.finish["c"].type == "length"
