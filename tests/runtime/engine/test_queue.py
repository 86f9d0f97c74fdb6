"""The order of admission: of each policy, with credit to the token, and after what is matched again."""

import random
from itertools import count

import pytest

from radix import Match, Namespace
from runtime.engine.queue import WaitingQueue
from runtime.request import Found, Request
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.requests import make_request

A, B = Namespace("a"), Namespace("b")


class Looking:
    """In place of a lease: the queue says what is found."""

    def __init__(self, queue: "Queue", request: Request):
        self.queue, self.request = queue, request

    def look(self) -> Found:
        self.queue.matched.append(self.request.rid)
        return Found(self.queue.found.get(self.request.tokens[0], 0), Match())


class Queue:
    """A `WaitingQueue` over a made-up cache, which has `found` of a request by its first token."""

    def __init__(self, policy: str, overtake_share: float = 0.1):
        self.found: dict[int, int] = {}
        self.matched: list[str] = []
        self.waiting = WaitingQueue(policy, overtake_share, 2048, 1)
        self.serial = count()

    def add(self, rid: str, tokens: list[int], priority: int = 0, namespace: Namespace = Namespace()) -> Request:
        message = {"rid": rid, "priority": priority, "namespace": namespace}
        request = make_request(tokens, 1, serial=next(self.serial), **message)
        request.lease = Looking(self, request)
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
        queue.waiting.refresh(lambda request: request.lease.look())
        assert sorted(r.rid for r in queue.waiting) == sorted(r.rid for r in here)
        assert len(set(queue.waiting.candidates(lambda: False))) == len(here)
        assert len(queue.waiting) == len(here)
    for request in here:
        queue.waiting.remove(request)
    assert not queue.waiting._families


def test_who_gives_way_is_cheap_to_compute_again(ids_dir):
    """Of two that could give way, the one goes whose prompt another request keeps."""
    core = make_core(ids_dir, pool_tokens=512, max_running=8)
    driver = Driver(core)
    root = list(range(100, 196))
    driver.add("first", [*root, 1], max_new_tokens=150)
    driver.step()
    driver.add("shares", [*root, 2, 3, 4], max_new_tokens=150)
    driver.add("own", list(range(3000, 3100)), max_new_tokens=150)
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


def admitted(queue: Queue, scarce: bool = False, number: int = 99) -> str:
    """Admit so many; their names."""
    names = ""
    while len(queue.waiting) and number:
        request = next(queue.waiting.candidates(lambda: scarce))
        queue.waiting.admit(request, scarce)
        names += request.rid
        number -= 1
    return names


def waiting(cached: int, cost: int, overtakers: str, share: float = 0.2) -> Queue:
    """Requests of this cost that are cached in part, behind `a`, which is not at all."""
    queue = Queue("balanced", overtake_share=share)
    queue.found = {7: cached}
    queue.add("a", [1] * cost)
    for rid in overtakers:
        queue.add(rid, [7] * (cached + cost))
    return queue


# -- orders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["priority", "lpm", "balanced"])
def test_equals_come_in_the_order_of_arrival(policy):
    queue = Queue(policy)
    for rid in "abc":
        queue.add(rid, [5, 6], priority=1)
    queue.add("z", [1, 1], priority=0)
    queue.add("y", [9, 9], priority=2)
    assert queue.order() == "yabcz"


def test_a_higher_priority_goes_before_a_longer_match():
    for policy in ("lpm", "balanced"):
        queue = Queue(policy)
        queue.found = {7: 900}
        queue.add("a", [7] * 901)
        queue.add("b", [1] * 9, priority=1)
        assert queue.order() == "ba"


def test_fcfs_and_priority_look_nothing_up():
    for policy in ("fcfs", "priority"):
        queue = Queue(policy)
        request = queue.add("a", [1, 2])
        queue.waiting.computed(request)
        queue.waiting.refresh(lambda request: request.lease.look())
        assert not queue.waiting.rank_again(request, 1)
        assert queue.matched == []


def test_whoever_does_not_wait_cannot_be_removed():
    queue = Queue("balanced")
    request = queue.add("a", [1])
    queue.waiting.remove(request)
    with pytest.raises(ValueError, match="a does not wait"):
        queue.waiting.remove(request)


# -- credit ------------------------------------------------------------------------------------------------------


def test_credit_for_four_full_steps_is_there_at_the_start_and_is_spent_to_the_token():
    assert admitted(waiting(1000, 1024, "bcdefghijk")) == "bcdefghiajk"
    assert admitted(waiting(1000, 1025, "bcdefghijk")) == "bcdefghaijk"
    assert admitted(waiting(1000, 8192, "bc")) == "bac"
    assert admitted(waiting(1000, 8193, "bc")) == "abc"


def test_admissions_in_order_earn_their_share():
    queue = waiting(1000, 1024, "bcdefghi")
    assert admitted(queue, number=8) == "bcdefghi"
    for rid in "jklm":
        queue.add(rid, [1] * 1024)
    queue.add("X", [7] * 2024)
    queue.add("Y", [7] * 2024)
    assert admitted(queue) == "ajklXmY", "a quarter of what four cost is what one costs"


def test_no_more_credit_is_saved_than_at_the_start():
    queue = waiting(1000, 1024, "")
    for rid in "xyz":
        queue.add(rid, [1] * 1024)
    assert admitted(queue) == "axyz"
    queue.add("a", [1] * 1024)
    for rid in "bcdefghijk":
        queue.add(rid, [7] * 2024)
    assert admitted(queue) == "bcdefghiajk"


def test_scarce_places_are_spent_and_earned_one_by_one():
    queue = waiting(1000, 2, "bcdefg")
    assert admitted(queue, scarce=True, number=5) == "bcdea"
    for rid in "jkl":
        queue.add(rid, [1] * 2)
    queue.add("X", [7] * 1002)
    assert admitted(queue, scarce=True) == "fgjXkl", "f, g and j were first in order, as a was"


def test_places_that_are_not_scarce_are_neither_spent_nor_earned():
    queue = waiting(1000, 2, "bcdefg")
    assert admitted(queue, number=6) == "bcdefg"
    for rid in "hijkl":
        queue.add(rid, [7] * 1002)
    assert admitted(queue, scarce=True) == "hijkal"


def test_no_more_places_are_saved_than_four():
    queue = waiting(1000, 2, "")
    for rid in "mnopq":
        queue.add(rid, [1] * 2)
    admitted(queue, scarce=True)
    queue.add("a", [1] * 2)
    for rid in "bcdef":
        queue.add(rid, [7] * 1002)
    assert admitted(queue, scarce=True) == "bcdeaf"


def test_the_mean_of_outputs_follows_slowly():
    queue = Queue("balanced")
    request = queue.add("a", [1] * 10)
    assert queue.waiting._cost(request) == 10
    request.prompt_len = 0
    for mean in (0.5, 0.975):
        queue.waiting.ended(request)
        assert queue.waiting._cost(request) == pytest.approx(10 + mean)
    queue.waiting.matched[request] = 4
    assert queue.waiting._cost(request) == pytest.approx(6.975)


def test_longest_match_knows_no_credit():
    queue = Queue("lpm")
    queue.found = {7: 10}
    queue.add("a", [1] * 9)
    for i in range(9):
        queue.add(str(i), [7] * 60_000)
    assert admitted(queue, scarce=True) == "012345678a"


# -- matched again -----------------------------------------------------------------------------------------------


def test_whoever_matches_less_than_before_loses_its_turn():
    queue = Queue("lpm")
    queue.found = {7: 5}
    first, second = queue.add("a", [7] * 9), queue.add("b", [7] * 9)
    assert not queue.waiting.rank_again(first, 5)
    assert not queue.waiting.rank_again(first, 6), "it matches more"
    assert queue.order() == "ab"
    assert queue.waiting.rank_again(first, 4)
    assert (queue.order(), queue.waiting.matched[first]) == ("ba", 4)
    queue = Queue("balanced")
    queue.found = {7: 5}
    first, second = queue.add("a", [7] * 9), queue.add("b", [7] * 9)
    assert not queue.waiting.rank_again(first, 4), "by arrival it is first all the same"
    assert queue.waiting.rank_again(second, 4)
    assert queue.waiting.matched[second] == 4


def test_only_those_are_matched_again_who_begin_like_what_was_computed():
    queue = Queue("lpm")
    for rid, token, namespace in (("a", 1, A), ("b", 1, B), ("c", 2, A), ("d", 1, A)):
        queue.add(rid, [token, 5], namespace=namespace)
    computed = queue.add("e", [1, 9], namespace=A)
    queue.waiting.remove(computed)
    queue.matched.clear()
    queue.waiting.computed(computed)
    queue.waiting.refresh(lambda request: request.lease.look())
    assert queue.matched == ["a", "d"]
    queue.waiting.refresh(lambda request: request.lease.look())
    assert queue.matched == ["a", "d"]


def test_a_pass_matches_sixteen_and_the_next_goes_on():
    queue = Queue("lpm")
    ones = [queue.add(f"a{i}", [1, i]) for i in range(20)]
    twos = [queue.add(f"b{i}", [2, i]) for i in range(14)]
    queue.waiting.computed(ones[0])
    queue.waiting.computed(twos[0])
    passes = []
    for _ in range(4):
        queue.matched.clear()
        queue.waiting.refresh(lambda request: request.lease.look())
        passes.append(list(queue.matched))
    assert [len(names) for names in passes] == [16, 16, 2, 0]
    assert passes[0] == [f"a{i}" for i in range(16)]
    assert passes[1] == [f"a{i}" for i in range(16, 20)] + [f"b{i}" for i in range(12)]
    assert passes[2] == ["b12", "b13"]


def test_exactly_sixteen_are_one_pass():
    queue = Queue("lpm")
    ones = [queue.add(f"a{i}", [1, i]) for i in range(16)]
    queue.add("b", [2])
    queue.waiting.computed(ones[0])
    queue.waiting.refresh(lambda request: request.lease.look())
    assert not queue.waiting._stale
    queue.waiting.computed(ones[0])
    for request in ones:
        queue.waiting.remove(request)
    assert (queue.waiting._stale, len(queue.waiting._families)) == ({}, 1), "nothing is kept of those who left"
