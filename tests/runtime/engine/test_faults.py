"""Faults of a strategy end the one request that it serves, and lose no page."""

import pytest

from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.engine.test_hard_lives import prompt_of

HOOKS = ("open", "find", "peer", "admit", "grow", "work", "rows", "book", "report")


@pytest.fixture(scope="module")
def core(tiny_dir):
    return make_core(tiny_dir, page_size=4, chunk_tokens=16, schedule_policy="lpm")


def break_hook(strategy, hook: str, after: int, before: bool, monkeypatch) -> None:
    """Let a hook raise for the request `bad` once it has worked `after` times, `before` or behind its work."""
    real, times = getattr(strategy, hook), [0]

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

    monkeypatch.setattr(strategy, hook, broken)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_fault_of_a_strategy_is_that_of_one_request(core, hook, after, before, monkeypatch):
    """The third call, too: a later chunk of the prompt, or a token."""
    driver = Driver(core)
    prompts = {rid: prompt_of(seed, 40) for seed, rid in enumerate(("good", "bad", "late"))}
    driver.add("good", prompts["good"], max_new_tokens=8)
    driver.run()
    break_hook(core.strategy, hook, after, before, monkeypatch)
    again = Driver(core)
    again.flush()
    for rid, prompt in prompts.items():
        again.add(rid, prompt, max_new_tokens=8)
    again.run()
    assert again.tokens["good"] == driver.tokens["good"]
    assert (again.finish["good"].type, again.finish["late"].type) == ("length", "length")
    if hook in ("open", "find", "peer", "admit") and after:  # called once or twice
        assert again.finish["bad"].type == "length"
    else:
        assert again.finish["bad"].type == "error"
        assert again.finish["bad"].message == "the step that computed this request failed: ZeroDivisionError"
