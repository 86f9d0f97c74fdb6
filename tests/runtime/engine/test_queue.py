"""The order of admission."""

from __future__ import annotations

import random
from itertools import count

import pytest

from radix import Namespace
from runtime.engine.queue import WaitingQueue
from runtime.request import Found, Request
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.requests import make_request


class Queue:
    """A `WaitingQueue` over a made-up cache, which has `found` of a request by its first token."""

    def __init__(self, policy: str, overtake_share: float = 0.1):
        self.found: dict[int, int] = {}
        self.matched: list[str] = []
        self.waiting = WaitingQueue(policy, overtake_share, 2048, 1)
        self.serial = count()

    def find(self, request: Request) -> Found:
        self.matched.append(request.rid)
        return Found(self.found.get(request.tokens[0], 0))

    def add(self, rid: str, tokens: list[int], priority: int = 0, namespace: Namespace = Namespace()) -> Request:
        message = {"rid": rid, "priority": priority, "namespace": namespace}
        request = make_request(tokens, 1, strategy=self, serial=next(self.serial), **message)
        self.waiting.add(request)
        return request

    def order(self) -> str:
        return "".join(request.rid for request in self.waiting.candidates(lambda: False))


def test_fcfs_knows_arrival_alone():
    queue = Queue("fcfs")
    queue.add("a", [1] * 9)
    queue.add("b", [2], priority=5)
    queue.add("c", [3])
    assert queue.order() == "abc"


@pytest.mark.parametrize("policy", ["priority", "lpm", "balanced"])
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


@pytest.mark.parametrize("scarce", [False, True])
def test_balanced_overtakes_within_its_bound(scarce):
    """However long it goes on: a tenth of the work, and a tenth of the places where these are scarce."""
    draw, queue = random.Random(3), Queue("balanced", overtake_share=0.1)
    queue.found = {7: 900}
    let_in: list[Request] = []
    overtakings = 0
    for i in range(3000):
        queue.add(str(i), [7 if draw.random() < 0.5 else 1] * draw.randrange(901, 1000))
        if i >= 500:
            request = next(queue.waiting.candidates(lambda: scarce))
            overtakings += any(other.serial < request.serial for other in queue.waiting)
            queue.waiting.admit(request, scarce)
            let_in.append(request)
    assert overtakings > 100
    for at in range(0, len(let_in), 50):
        before, mine = let_in[:at], let_in[at].serial
        late, due = ([r for r in before if (r.serial > mine) == side] for side in (True, False))
        assert cost(queue, late) <= cost(queue, due) / 9 + 4 * 2048
        assert not scarce or len(late) <= len(due) / 9 + 4


def cost(queue: Queue, requests: list[Request]) -> int:
    return sum(len(request.tokens) - queue.found.get(request.tokens[0], 0) for request in requests)


def test_balanced_lets_through_what_is_cached_and_keeps_the_order_otherwise():
    queue = Queue("balanced")
    queue.found = {7: 8000}
    for rid, tokens in {"a": [1] * 8000, "b": [2] * 400, "c": [7] * 8001, "d": [7] * 50_000}.items():
        queue.add(rid, tokens)
    assert queue.order() == "cabd", "d finds as much, but costs more than can be spent"


def test_balanced_counts_what_is_generated_too():
    queue = Queue("balanced")
    queue.found = {7: 1000}
    for rid in "abc":
        queue.add(rid, [1] * 1000)
        queue.add(rid.upper(), [7] * 1001)
    assert queue.order() == "ABCabc", "one row of the prompt each"
    ended = queue.add("z", [1])
    queue.waiting.remove(ended)
    ended.tokens.extend([1] * 4 * 2048)
    for _ in range(40):
        queue.waiting.ended(ended)
    first = next(queue.waiting.candidates(lambda: False))
    queue.waiting.admit(first, False)
    assert first.rid == "A"
    assert queue.order() == "abBcC", "by arrival: the credit is spent on what A will generate"


def test_balanced_gives_no_credit_where_none_is_wanted():
    queue = Queue("balanced", overtake_share=0.0)
    queue.found = {7: 8000}
    queue.waiting._tokens = 0.0
    queue.add("a", [1] * 8000)
    queue.add("b", [7] * 8001)
    assert queue.order() == "ab"


def test_refreshing_takes_a_bounded_number_a_pass_and_reaches_everybody():
    queue = Queue("lpm")
    requests = [queue.add(str(i), [1, i]) for i in range(200)]
    queue.found[1] = 1
    queue.waiting.computed(requests[0])
    passes = 0
    while any(queue.waiting.matched[request] == 0 for request in requests):
        queue.matched.clear()
        queue.waiting.refresh()
        assert 0 < len(queue.matched) <= 16
        passes += 1
    assert passes == 13
    queue.matched.clear()
    queue.waiting.refresh()
    assert queue.matched == []


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "balanced"])
def test_random_comings_and_goings(policy):
    draw, queue, here = random.Random(1), Queue(policy), []
    for step in range(600):
        if draw.random() < 0.6 or not here:
            here.append(queue.add(f"{step} ", [draw.randrange(5) for _ in range(draw.randrange(1, 9))]))
        else:
            queue.waiting.remove(here.pop(draw.randrange(len(here))))
        queue.found[draw.randrange(5)] = draw.randrange(9)
        if here:
            queue.waiting.computed(draw.choice(here))
            queue.waiting.rank_again(draw.choice(here), draw.randrange(9))
        queue.waiting.refresh()
        assert sorted(r.rid for r in queue.waiting) == sorted(r.rid for r in here)
        assert len(set(queue.waiting.candidates(lambda: False))) == len(here)
        assert len(queue.waiting) == len(here)
    for request in here:
        queue.waiting.remove(request)
    assert not queue.waiting._families


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "balanced"])
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


def test_cached_modules_cost_nothing():
    """Nor do they earn credit: what is matched may be more than the request's own tokens."""
    queue = Queue("balanced")
    queue.found = {1: 5000}
    request = queue.add("a", [1, 2, 3])
    request.entry_tokens.extend([9] * 5000)
    assert queue.waiting._cost(request) == 3
