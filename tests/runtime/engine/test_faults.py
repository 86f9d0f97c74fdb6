"""Faults of a strategy end the one request that it serves, and lose no page."""

import pytest

from runtime.reuse.prefix import PrefixLease
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.engine.test_hard_lives import prompt_of

HOOKS = ("open", "look", "peer", "admit", "grow", "work", "rows", "book", "report")


@pytest.fixture(scope="module")
def core(tiny_dir):
    return make_core(tiny_dir, page_size=4, chunk_tokens=16, schedule_policy="lpm")


def break_hook(strategy, hook: str, after: int, before: bool, monkeypatch) -> None:
    """Let a hook raise for the request `bad` once it has worked `after` times, `before` or behind its work."""
    owner = strategy if hook == "open" else PrefixLease
    real, times = getattr(owner, hook), [0]

    def broken(what, *args, **options):
        is_bad = getattr(what, "request", what).rid == "bad"
        times[0] += is_bad
        fails = is_bad and times[0] > after
        if fails and before:
            raise ZeroDivisionError
        found = real(what, *args, **options)
        if fails:
            raise ZeroDivisionError
        return found

    monkeypatch.setattr(owner, hook, broken)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("end", ["length", "abort", "error"])
def test_a_request_whose_pages_cannot_be_kept_ends_as_it_would(core, end, before, monkeypatch):
    plain, prompts = Driver(core), {rid: prompt_of(seed, 40) for seed, rid in enumerate(("good", "bad"))}
    plain.flush()
    for rid, prompt in prompts.items():
        plain.add(rid, prompt, max_new_tokens=8)
    plain.run()
    break_hook(core.strategies.default, "release", 0, before, monkeypatch)
    if end == "error":
        break_hook(core.strategies.default, "report", 2, True, monkeypatch)
    driver = Driver(core)
    driver.flush()
    for rid, prompt in prompts.items():
        driver.add(rid, prompt, max_new_tokens=8)
    while end == "abort" and not driver.tokens["bad"]:
        driver.step()
    if end == "abort":
        driver.abort("bad")
    driver.run()
    assert (driver.finish["bad"].type, driver.finish["good"].type) == (end, "length")
    assert driver.tokens["good"] == plain.tokens["good"]
    assert end != "length" or driver.tokens["bad"] == plain.tokens["bad"]


@pytest.mark.parametrize("before", [True, False])
def test_a_request_that_cannot_be_retracted_fails_alone(ids_dir, before, monkeypatch):
    core = make_core(ids_dir, page_size=4, pool_tokens=128)
    driver = Driver(core)
    break_hook(core.strategies.default, "release", 0, before, monkeypatch)
    for rid in ("good", "bad"):  # together they need more than the pool has, and the later one is retracted
        driver.add(rid, prompt_of(len(rid), 40), max_new_tokens=60)
    driver.run()
    assert (driver.finish["bad"].type, driver.finish["good"].type) == ("error", "length")
    assert 0 < len(driver.tokens["bad"]) < 60 == len(driver.tokens["good"])


def test_a_request_whose_runs_cannot_be_told_fails_alone(ids_dir, monkeypatch):
    core = make_core(ids_dir, page_size=4, host_memory=0.01)
    driver = Driver(core)
    break_hook(core.strategies.default, "reads", 0, True, monkeypatch)
    for rid in ("good", "bad", "late"):
        driver.add(rid, prompt_of(len(rid), 40), max_new_tokens=2)
    driver.run()
    assert [driver.finish[rid].type for rid in ("good", "bad", "late")] == ["length", "error", "length"]
    assert driver.finish["bad"].message == "the step that computed this request failed: ZeroDivisionError"
    core.close()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_fault_of_a_strategy_is_that_of_one_request(core, hook, after, before, monkeypatch):
    """The third call, too: a later chunk of the prompt, or a token."""
    driver = Driver(core)
    prompts = {rid: prompt_of(seed, 40) for seed, rid in enumerate(("good", "bad", "late"))}
    driver.add("good", prompts["good"], max_new_tokens=8)
    driver.run()
    break_hook(core.strategies.default, hook, after, before, monkeypatch)
    again = Driver(core)
    again.flush()
    for rid, prompt in prompts.items():
        again.add(rid, prompt, max_new_tokens=8)
    again.run()
    assert again.tokens["good"] == driver.tokens["good"]
    assert (again.finish["good"].type, again.finish["late"].type) == ("length", "length")
    if hook in ("open", "look", "peer", "admit") and after:  # called once or twice
        assert again.finish["bad"].type == "length"
    else:
        assert again.finish["bad"].type == "error"
        assert again.finish["bad"].message == "the step that computed this request failed: ZeroDivisionError"
