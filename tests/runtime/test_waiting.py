"""Who is admitted next."""

from __future__ import annotations

import random
from array import array
from itertools import count

import pytest

from runtime.request import Request
from runtime.sampling_params import SamplingParams
from runtime.waiting import Waiting
from tests.runtime.driver import Driver, make_core


class Queue:
    """A `Waiting` over a made-up cache: what is found of a request is what `found` says for its first token."""

    def __init__(self, policy: str, max_overtake: float = 10.0):
        self.found: dict[int, int] = {}
        self.matched: list[str] = []
        self.waiting = Waiting(policy, max_overtake, 1, self.match)
        self.sequence = count()

    def match(self, request: Request) -> int:
        self.matched.append(request.rid)
        return self.found.get(request.tokens[0], 0)

    def add(self, rid: str, tokens: list[int], arrival: float = 0.0, priority: int = 0) -> Request:
        request = Request(
            rid,
            array("i", tokens),
            len(tokens),
            SamplingParams(),
            frozenset(),
            len(tokens) + 1,
            priority=priority,
            sequence=next(self.sequence),
            arrival_s=arrival,
        )
        self.waiting.add(request)
        return request

    def order(self) -> str:
        return "".join(request.rid for request in self.waiting)


def test_fcfs_knows_arrival_alone():
    queue = Queue("fcfs")
    queue.add("a", [1] * 9)
    queue.add("b", [2], priority=5)
    queue.add("c", [3])
    assert queue.order() == "abc"


@pytest.mark.parametrize("policy", ["priority", "lpm", "dfs", "balanced"])
def test_priority_goes_first_in_the_others(policy):
    queue = Queue(policy)
    queue.add("a", [1])
    queue.add("b", [2], priority=1)
    assert queue.order() == "ba"


def test_lpm_and_what_was_computed_since():
    queue = Queue("lpm")
    queue.found = {7: 3}
    queue.add("a", [1, 2, 3, 4])
    queue.add("b", [7, 2, 3, 4])
    done = queue.add("c", [1, 9])
    assert queue.order() == "bac"
    queue.found[1] = 4
    queue.waiting.remove(done)
    queue.waiting.computed(done)
    queue.matched.clear()
    queue.waiting.refresh()
    assert queue.order() == "ab"
    assert queue.matched == ["a"], "only what begins like it is looked up again"


def test_dfs_puts_neighbours_together():
    queue = Queue("dfs")
    for rid, tokens in {"a": [1, 5], "b": [2, 5], "c": [1, 6], "d": [2, 5, 1]}.items():
        queue.add(rid, tokens)
    assert queue.order() in ("acbd", "bdac")


def test_balanced_overtakes_within_its_bound():
    queue = Queue("balanced", max_overtake=10.0)
    queue.found = {7: 8000}
    queue.add("a", [1] * 8000, arrival=0.0)
    queue.add("b", [7] * 8000, arrival=9.9)
    queue.add("c", [7] * 8000, arrival=10.1)
    queue.add("d", [2] * 400, arrival=5.0)
    assert queue.order() == "dbac", "short or cached ones go first, but none that came ten seconds later"


def test_refreshing_takes_a_bounded_number_a_pass_and_reaches_everybody():
    queue = Queue("lpm")
    requests = [queue.add(str(i), [1, i]) for i in range(200)]
    queue.found[1] = 1
    queue.waiting.computed(requests[0])
    passes = 0
    while any(request.matched_tokens == 0 for request in requests):
        queue.matched.clear()
        queue.waiting.refresh()
        assert 0 < len(queue.matched) <= 64
        passes += 1
    assert passes == 4
    queue.matched.clear()
    queue.waiting.refresh()
    assert queue.matched == []


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "dfs", "balanced"])
def test_random_comings_and_goings(policy):
    draw, queue, here = random.Random(1), Queue(policy), []
    for step in range(600):
        if draw.random() < 0.6 or not here:
            here.append(queue.add(f"{step} ", [draw.randrange(5) for _ in range(draw.randrange(1, 9))], arrival=step))
        else:
            queue.waiting.remove(here.pop(draw.randrange(len(here))))
        queue.found[draw.randrange(5)] = draw.randrange(9)
        if here:
            queue.waiting.computed(draw.choice(here))
            queue.waiting.rank_again(draw.choice(here), draw.randrange(9))
        queue.waiting.refresh()
        assert sorted(r.rid for r in queue.waiting) == sorted(r.rid for r in here)
        assert [r.rank for r in queue.waiting] == sorted(r.rank for r in here)
        assert len(queue.waiting) == len(here)
    for request in here:
        queue.waiting.remove(request)
    assert not queue.waiting._families


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "dfs", "balanced"])
def test_every_policy_serves_everybody_with_the_same_tokens(tiny_dir, policy):
    draw = random.Random(2)
    roots = [[draw.randrange(49152) for _ in range(40)] for _ in range(3)]
    prompts = [draw.choice(roots) + [draw.randrange(49152) for _ in range(draw.randrange(1, 30))] for _ in range(30)]
    driver = Driver(make_core(tiny_dir, pool_tokens=400, schedule_policy=policy, max_running=6, step_tokens=64))
    plain = Driver(make_core(tiny_dir, prefix_cache=False))
    assert driver.together(prompts, max_new_tokens=12) == plain.together(prompts, max_new_tokens=12)


def test_who_gives_way_is_cheap_to_compute_again(tiny_dir):
    """Of two that could give way, the one goes whose prompt another request keeps."""
    core = make_core(tiny_dir, pool_tokens=512, max_running=8)
    driver = Driver(core)
    root = list(range(100, 196))
    driver.add("first", [*root, 1], max_new_tokens=150)
    driver.step()
    driver.add("shares", [*root, 2, 3, 4], max_new_tokens=150)
    driver.add("own", list(range(5000, 5100)), max_new_tokens=150)
    retracted = []
    retract = core.scheduler._retract
    core.scheduler._retract = lambda request: (retracted.append(request.rid), retract(request))
    driver.run()
    assert retracted[0] == "shares"
    assert "first" not in retracted
