"""The scheduler: the budget of rows, peers, and ends of requests."""

import pytest

from radix import Namespace
from runtime.config import make_config
from runtime.engine.scheduler import Scheduler
from runtime.request import Status
from runtime.reuse.prefix import PrefixStrategy
from tests.namespaces import others
from tests.runtime.engine.steps import Engine, prompt

SPACE = Namespace("a", "salt")

# -- the budget of rows ------------------------------------------------------------------------------------------


def test_decode_rows_come_first_then_chunks_then_newcomers():
    engine = Engine(step_tokens=10, chunk_tokens=4)
    engine.add("a", prompt(1, 4))
    engine.add("b", prompt(2, 9))
    assert engine.step() == {"a": 4, "b": 4}
    engine.add("c", prompt(3, 9))
    assert engine.step() == {"a": 1, "b": 4, "c": 4}
    engine.add("d", prompt(4, 9))
    assert engine.step() == {"a": 1, "b": 1, "c": 4, "d": 4}
    assert engine.step() == {"a": 1, "b": 1, "c": 1, "d": 4}


def test_a_step_has_no_more_rows_than_its_budget():
    engine = Engine(step_tokens=10)
    engine.add("a", prompt(1, 7))
    engine.add("b", prompt(2, 8))
    engine.add("c", prompt(3, 5))
    assert engine.step() == {"a": 7, "b": 3}
    assert engine.waiting == "c", "no row is left for it"
    assert engine.step() == {"a": 1, "b": 5, "c": 4}
    assert engine.step() == {"a": 1, "b": 1, "c": 1}


def test_a_configured_step_goes_before_the_device_s():
    engine = Engine(step_tokens=10, chunk_tokens=None)
    assert (engine.scheduler.step_tokens, engine.scheduler._chunk_tokens) == (10, 10)
    engine = Engine(chunk_tokens=3)
    engine.scheduler = Scheduler(make_config(step_tokens=5).scheduler, engine.cache, 10)
    engine.add("a", prompt(1, 7))
    assert engine.steps(2) == [{"a": 5}, {"a": 2}]


def test_running_prompts_share_what_is_left_to_the_last_row():
    engine = Engine(step_tokens=5, chunk_tokens=4)
    engine.add("a", prompt(1, 20))
    engine.add("b", prompt(2, 20))
    assert engine.steps(2) == [{"a": 4, "b": 1}] * 2
    engine.scheduler.step_tokens = 4
    assert engine.step() == {"a": 4}, "a share without rows is none"


def test_a_prompt_whose_log_probabilities_are_wanted_has_half_a_chunk():
    engine = Engine(step_tokens=10, chunk_tokens=7)
    engine.add("a", prompt(1, 8), prompt_logprobs_from=0)
    engine.add("b", prompt(2, 12))
    assert engine.steps(3) == [{"a": 3, "b": 7}, {"a": 3, "b": 5}, {"a": 2, "b": 1}]
    for chunk_tokens in (1, 3):
        engine = Engine(step_tokens=10, chunk_tokens=chunk_tokens)
        engine.add("a", prompt(1, 3), prompt_logprobs_from=0)
        assert engine.step() == {"a": 1}


def test_a_long_prompt_leaves_half_of_a_step_to_shorter_ones():
    engine = Engine(pages=512, step_tokens=16)
    engine.add("long", prompt(1, 200))
    assert engine.step() == {"long": 16}
    engine.add("longer", prompt(2, 210))
    engine.add("short", prompt(3, 12))
    engine.add("shorter", prompt(4, 3))
    assert engine.step() == {"long": 8, "short": 8}
    assert engine.step() == {"long": 9, "short": 4, "shorter": 3}, "first come, first served, but no longer than half"
    assert engine.step() == {"long": 14, "short": 1, "shorter": 1}
    engine.add("middle", prompt(5, 40))
    engine.step()
    engine.add("late", prompt(6, 2))
    assert engine.step() == {"long": 7, "middle": 5, "late": 2, "short": 1, "shorter": 1}, "the shortest goes first"
    while engine.requests["long"].num_remaining > 1:
        assert engine.step()["long"] >= 6
    assert engine.waiting == "longer"


def test_shorter_prompts_overtake_nobody_of_higher_priority_nor_for_the_last_place():
    for fields, options in (({"priority": 0}, {}), ({"priority": 1}, {"max_running": 2})):
        engine = Engine(pages=512, step_tokens=16, **options)
        engine.add("long", prompt(1, 200), priority=1)
        engine.step()
        engine.add("short", prompt(3, 3), **fields)
        assert engine.step() == {"long": 16}
    engine = Engine(pages=230, step_tokens=16)
    engine.add("long", prompt(1, 200))
    engine.step()
    engine.add("middle", prompt(3, 100))
    engine.add("short", prompt(4, 8))
    assert engine.step() == {"long": 16}, "memory does not suffice for the middle one"
    assert engine.step() == {"long": 16}, "which may not be kept waiting by shorter ones"


def test_no_more_run_than_may():
    engine = Engine(max_running=2)
    for rid in "abc":
        engine.add(rid, prompt(ord(rid), 3), new=2)
    assert engine.step().keys() == {"a", "b"}
    assert engine.step() == {"a": 1, "b": 1}
    assert engine.step() == {"c": 3}


# -- peers -------------------------------------------------------------------------------------------------------


def test_the_same_prefix_waits_for_the_one_that_computes_it_and_no_longer():
    engine = Engine(page_size=4, step_tokens=9, chunk_tokens=3)
    shared = prompt(1, 12)
    engine.add("a", shared)
    engine.add("b", [*shared[:4], 7, 8])
    engine.add("c", [*shared[:8], 7])
    assert engine.step() == {"a": 3}
    states = [engine.requests[rid].status for rid in "abc"]
    assert states == [Status.RUNNING, Status.BLOCKED, Status.BLOCKED]
    assert engine.step() == {"a": 3}
    assert engine.waiting == "bc", "the awaited page is there"
    assert engine.step() == {"a": 3, "b": 2}, "b reads it, and c waits for the next"
    assert engine.waiting == "c"
    assert engine.step() == {"a": 3, "b": 1, "c": 1}


@pytest.mark.parametrize("fields", [*({"namespace": space} for space in others(SPACE)), {"store": False}], ids=str)
def test_nobody_waits_for_what_it_could_not_read(fields):
    """Else the time to the first token would tell that somebody else computes the same prompt now."""
    engine = Engine(chunk_tokens=4)
    fields = {"namespace": SPACE} | fields
    engine.add("a", prompt(1, 8), **fields)
    engine.add("b", prompt(1, 8), namespace=SPACE)
    assert engine.steps(2) == [{"a": 4, "b": 4}] * 2
    assert not engine.blocked


def test_a_peer_that_ends_wakes_whoever_waits_for_it():
    for keep in (True, False):
        engine = Engine(page_size=8, chunk_tokens=6)
        engine.add("a", prompt(1, 20))
        engine.add("b", prompt(1, 21))
        engine.add("c", prompt(1, 22))
        assert engine.step() == {"a": 6}
        assert engine.blocked == "bc"
        engine.remove("c")
        engine.remove("a", keep)
        assert (engine.running, engine.waiting, engine.blocked) == ("", "b", "")
        assert engine.step() == {"b": 6}


def test_a_peer_that_is_retracted_wakes_whoever_waits_for_it():
    engine = Engine(page_size=8, chunk_tokens=5)
    engine.add("a", prompt(1, 4))
    engine.step()
    engine.add("b", prompt(2, 12))
    engine.add("c", prompt(2, 13))
    assert engine.step() == {"a": 1, "b": 5}
    assert engine.blocked == "c"
    engine.scheduler._retract(engine.requests["b"])
    assert sorted(engine.waiting) == ["b", "c"]
    assert not engine.blocked
    assert engine.requests["b"].status is Status.WAITING


def test_only_requests_of_the_same_strategy_are_peers():
    engine = Engine(chunk_tokens=4)
    engine.add("a", prompt(1, 8), strategy=PrefixStrategy(engine.cache, 1))
    engine.add("b", prompt(1, 8))
    assert engine.step() == {"a": 4, "b": 4}


def test_a_peer_is_one_that_prefills_beyond_this_step():
    engine = Engine()
    engine.add("a", [5])
    engine.add("b", [5, 6])
    assert engine.step() == {"a": 1, "b": 2}
    engine.add("c", [7, 8])
    engine.add("d", [7, 8, 9])
    assert engine.step() == {"a": 1, "b": 1, "c": 2}


def test_one_that_decodes_is_no_peer():
    """Nobody waits for the end of its page."""
    engine = Engine(page_size=8)
    tokens = engine.add("a", prompt(1, 12)).tokens
    engine.steps(7)
    assert len(tokens) == 19
    engine.add("b", [*tokens[:17], 5])
    assert engine.step() == {"a": 1, "b": 10}


def test_those_that_take_turns_are_peers_of_their_like():
    engine = Engine()
    engine.add("a", prompt(1, 4), strategy=engine.in_turns)
    engine.step()
    later = engine.add("b", prompt(1, 4), strategy=engine.in_turns)
    later.lease.peer = lambda found, computing: (computing[0].request, 1) if computing else None
    engine.add("c", prompt(1, 4))
    engine.step()
    assert (engine.running, engine.blocked) == ("ac", "b")


def test_few_of_those_who_wait_are_looked_at_in_a_step():
    engine = Engine(page_size=8, chunk_tokens=1, max_running=2)
    for i in range(9):
        engine.add(str(i), [*prompt(1, 8), i], priority=-i)
    engine.step()
    assert (engine.running, engine.blocked, engine.waiting) == ("0", "123", "45678")


def test_blocked_on_an_event_until_it_comes():
    engine = Engine()
    engine.add("a", [1, 2, 3], blocked_on="a's grammar")
    assert engine.step() == {}
    assert engine.requests["a"].status is Status.BLOCKED
    engine.scheduler.wake("another grammar")
    assert engine.step() == {}
    engine.scheduler.wake("a's grammar")
    assert engine.requests["a"].status is Status.WAITING
    assert engine.step() == {"a": 3}
    engine.add("b", [4, 5], blocked_on="b's grammar")
    engine.remove("b")
    engine.scheduler.wake("b's grammar")
    assert engine.step() == {"a": 1}


def test_those_who_wait_are_matched_again_with_what_was_computed():
    engine = Engine(page_size=4, chunk_tokens=6, max_running=1, schedule_policy="lpm")
    engine.add("a", prompt(1, 12))
    engine.add("b", [*prompt(1, 6), 5, 5, 5])
    engine.add("c", prompt(3, 9))
    engine.steps(2)
    assert [engine.scheduler.waiting.matched[engine.requests[rid]] for rid in "bc"] == [4, 0]


def test_places_are_counted_where_the_last_one_is_taken():
    engine = Engine(schedule_policy="balanced", max_running=2)
    engine.scheduler.waiting._seats = 2.0
    for rid, places in (("a", 2.0), ("b", 2 + 1 / 9)):
        engine.add(rid, prompt(ord(rid), 3))
        engine.step()
        assert engine.scheduler.waiting._seats == pytest.approx(places)


def test_nobody_overtakes_for_the_last_place_without_credit():
    for places, first in ((0.0, "a"), (1.0, "b")):
        engine = Engine(schedule_policy="balanced", max_running=1)
        engine.add("p", prompt(2, 8), new=1)
        engine.step()
        engine.scheduler.waiting._seats = places
        engine.add("a", prompt(1, 4))
        engine.add("b", prompt(2, 9))
        engine.step()
        assert engine.running == first


# -- the end -----------------------------------------------------------------------------------------------------


def test_a_waiting_request_that_leaves_does_not_run():
    engine = Engine(max_running=1)
    engine.add("a", prompt(1, 3), new=2)
    engine.add("b", prompt(2, 3))
    engine.step()
    engine.remove("b")
    assert (engine.step(), engine.step()) == ({"a": 1}, {})


def test_a_request_that_has_ended_leaves_what_it_computed():
    engine = Engine()
    engine.add("a", prompt(1, 3), new=4)
    engine.steps(4)
    assert (engine.running, engine.cached([*prompt(1, 3), 9, 9, 9])) == ("", 6)


def test_computed_rows_stay_cached_if_they_are_to_be_kept():
    for keep, cached in ((True, 6), (False, 4)):
        engine = Engine()
        engine.add("a", prompt(1, 4))
        engine.steps(3)
        engine.remove("a", keep)
        assert engine.cached([*prompt(1, 4), 9, 9, 9]) == cached
        engine.cache.check([])
        assert engine.cache.num_available == 64


def test_an_output_s_length_is_booked_where_a_request_ran():
    engine = Engine(schedule_policy="balanced")
    engine.add("a", [1, 2], new=5)
    engine.add("b", [3, 4])
    engine.remove("b")
    assert engine.scheduler.waiting._generated == 0
    engine.steps(5)
    assert engine.scheduler.waiting._generated > 0


def test_pages_cost_the_time_of_all_rows_since_the_last_ones():
    """A row takes a second here."""
    engine = Engine(page_size=4, chunk_tokens=3)
    engine.add("a", prompt(1, 14))
    costs = []
    for _ in range(5):
        engine.step()
        costs.append(sorted(node.cost for node in engine.cache.tree.nodes()))
    assert costs == [[], [6.0], [3.0, 6.0], [3.0, 3.0, 6.0], [3.0, 3.0, 6.0]]
    engine.steps(4)
    engine.remove("a")
    assert sorted(node.cost for node in engine.cache.tree.nodes()) == [3.0, 3.0, 6.0, 6.0]


# -- accounts ----------------------------------------------------------------------------------------------------


def test_places_are_shared_among_accounts_that_wait():
    engine = Engine(max_running=4, step_tokens=64)
    for i in range(6):
        engine.add(f"a{i}", prompt(i, 3), account="a")
    assert engine.step().keys() == {"a0", "a1", "a2", "a3"}
    engine.add("b0", prompt(10, 3), new=1, account="b")
    engine.add("b1", prompt(11, 3), account="b")
    engine.add("b2", prompt(12, 3), account="b")
    engine.add("c0", prompt(13, 3), account="c")
    assert engine.step().keys() == {"a0", "a1", "b0", "c0"}, "the latest ones of the account with most places"
    assert engine.scheduler.num_retracted == 2
    assert engine.step().keys() == {"a0", "a1", "b1", "c0"}, "a free place is for whoever has fewest"
    assert [engine.step().keys() for _ in range(5)] == [{"a0", "a1", "b1", "c0"}] * 5, "one place more is no reason"
    engine.scheduler.remove(engine.requests["c0"])
    assert engine.step().keys() == {"a0", "a1", "b1", "b2"}
    for rid in ("b1", "b2"):
        engine.scheduler.remove(engine.requests[rid])
    assert engine.step().keys() == {"a0", "a1", "a2", "a3"}


def test_one_account_keeps_what_it_has():
    engine = Engine(max_running=2)
    for i in range(6):
        engine.add(f"a{i}", prompt(i, 3), account="a")
    assert [engine.step().keys() for _ in range(3)] == [{"a0", "a1"}] * 3
    assert engine.scheduler.num_retracted == 0


def test_a_place_is_not_taken_from_a_higher_priority():
    engine = Engine(max_running=3)
    for i in range(3):
        engine.add(f"a{i}", prompt(i, 3), account="a", priority=1)
    engine.step()
    engine.add("b", prompt(9, 3), account="b")
    assert engine.step().keys() == {"a0", "a1", "a2"}


def test_memory_is_shared_as_places_are():
    engine = Engine(pages=64, step_tokens=64)
    for i in range(6):
        engine.add(f"a{i}", prompt(i, 10), new=20, account="a")
    engine.steps(2)
    assert len(engine.scheduler.running) == 5, "the pool holds no more"
    engine.add("b", prompt(9, 12), new=3, account="b")
    assert "b" in {rid for step in engine.steps(4) for rid in step}
    assert len(engine.scheduler.running) > 2


# -- prompts beside decode rows ------------------------------------------------------------------------------------


def test_decode_rows_leave_a_share_of_the_step_to_prompts():
    engine = Engine(pages=512, step_tokens=8, max_running=8)
    for i in range(8):
        engine.add(f"a{i}", prompt(i, 2))
    rows = engine.steps(12)
    assert {**rows[-1]} == {f"a{i}": 1 for i in range(8)}, "without prompts, all decode"
    assert all(len(step) <= 8 for step in rows)
    engine.scheduler.remove(engine.requests["a0"])
    engine.add("long", prompt(20, 20))
    steps = engine.steps(7)
    assert [step["long"] for step in steps] == [2] * 7
    decoded = [sum(rid in step for step in steps) for rid in (f"a{i}" for i in range(1, 8))]
    assert set(decoded) == {6}, "they take turns"
