"""Hold times in the engine: what requests used stays for a time, and live requests win."""

import pytest

from runtime.calls import FlushCache, GetTree
from tests.runtime.engine.driver import Driver, call, make_core

PREFIX = list(range(1000, 1100))
FLOOD = [[i] * 60 for i in range(20)]


@pytest.mark.parametrize(
    ("hold_time", "hold_s", "stays"),
    [("0", None, False), ("99", None, True), ("99", 0.0, False), ("0:99", None, False), ("0:99", 99.0, True)],
)
def test_a_used_prefix_stays_for_its_hold_time(ids_dir, hold_time, hold_s, stays):
    driver = Driver(make_core(ids_dir, pool_tokens=640, hold_time=hold_time))
    driver.add("first", PREFIX, max_new_tokens=1, hold_s=hold_s)
    driver.run()
    for prompt in FLOOD:
        driver.together([prompt], max_new_tokens=1, hold_s=0.0)
    held = {node.held_s > 0 for node in call(driver.core, GetTree()).nodes}
    assert held == ({True, False} if stays else {False})
    driver.add("again", PREFIX, max_new_tokens=1, hold_s=0.0)
    driver.run()
    assert driver.cached("again") == (96 if stays else 0)
    state = driver.core.state()
    assert (state["pages_held"], state["held_pages_lost"]) == (6 if stays else 0, 0)
    assert call(driver.core, FlushCache()).live_tokens == 0
    assert driver.core.state()["pages_held"] == state["held_pages_broken"] == 0


def test_what_a_request_only_reads_is_held_too_and_the_longer_hold_stays(ids_dir):
    core = make_core(ids_dir, pool_tokens=640, hold_time="0:900")
    driver = Driver(core)
    driver.together([PREFIX], max_new_tokens=1)
    assert core.state()["pages_held"] == 0
    for number, hold_s in enumerate((900.0, 5.0, None)):
        driver.add(f"{number}", [*PREFIX[:64], number, number], max_new_tokens=1, hold_s=hold_s, store=False)
        driver.run()
        (held,) = (node.held_s for node in call(core, GetTree()).nodes if node.held_s)
        assert 800 < held <= 900
        assert core.state()["pages_held"] == 4
