"""The choice by prefix, load and past work."""

import random
from collections import Counter

from server.ray.placement import Placement

REPLICAS = ("a", "b", "c")
BLOCK = 10


def placement(weight: float = 2, balance: float = 0.0) -> Placement[str]:
    made = Placement[str](BLOCK, weight, balance, random.Random(0))
    for replica in REPLICAS:
        made.join(replica)
    return made


def other(blocks: int, start: int = 1000) -> list[int]:
    return list(range(start, start + blocks))


def test_the_longest_prefix_wins_until_load_outweighs_it():
    known = placement()
    prompt = list(range(4))
    known.index.stored("a", prompt[:1])
    known.index.stored("b", prompt)
    assert known.rank(prompt, REPLICAS) == ["b", "a", "c"]
    known.begin("b", "1", other(5))
    assert known.rank(prompt, REPLICAS)[0] == "b", "50 tokens of load against twice the 30 that b holds more"
    known.begin("b", "2", other(2, 2000))
    assert known.rank(prompt, REPLICAS) == ["a", "b", "c"], "70 tokens of load cost more than those 60"
    known.end("b", "1")
    assert known.rank(prompt, REPLICAS)[0] == "b"


def test_a_prefix_that_is_being_computed_counts_already():
    known = placement()
    prompt = list(range(8))
    known.begin("c", "1", prompt)
    assert known.matches([*prompt[:5], 99]) == {"c": 50}
    assert known.rank([*prompt, 8], REPLICAS)[0] == "c"
    known.begin("c", "2", [*prompt, 8])
    assert known.loads == {"a": 0, "b": 0, "c": 90}, "the second computes its own block alone"
    known.end("c", "1")
    assert known.matches(prompt) == {"c": 80}, "of the other one"
    known.end("c", "2")
    assert not known._wanted["c"]
    assert known.matches(prompt) == {}, "from here on events say what it holds"


def test_new_prompts_go_to_those_who_have_worked_less():
    known = placement(balance=0.1)
    for number in range(30):
        chosen = known.rank(other(5, 100 * number), REPLICAS)[0]
        known.begin(chosen, str(number), other(5, 100 * number))
        known.end(chosen, str(number))
    assert set(known._work.values()) == {500.0}
    known.join("d")
    assert known._work["d"] == 500, "a new one need not catch up"
    known.leave("a")
    assert known.loads == {"b": 0, "c": 0, "d": 0}


def test_past_work_gives_way_to_a_prefix():
    known = placement(weight=16, balance=0.1)
    prompt = list(range(10))
    known.begin("a", "1", prompt)
    known.end("a", "1")
    known.index.stored("a", prompt)
    assert known.rank(prompt, REPLICAS)[0] == "a", "100 tokens of work count for 7 here, those held for 1,600"
    assert known.rank(other(10), REPLICAS)[0] != "a"


def test_calls_without_a_prompt_are_spread():
    known = placement(balance=0.1)
    known.begin("a", "1", other(50))
    known.end("a", "1")
    first = Counter(known.rank([], REPLICAS)[0] for _ in range(300))
    assert min(first[replica] for replica in REPLICAS) > 60, "past work is no matter"


def test_a_replica_that_has_left_is_no_matter():
    known = placement()
    known.index.stored("a", [1, 2])
    known.begin("a", "1", [1, 2, 3])
    known.leave("a")
    known.end("a", "1")
    known.begin("a", "2", [1, 2, 3])
    assert known.matches([1, 2, 3]) == {}
    assert sorted(known.rank([1, 2, 3], REPLICAS)) == list(REPLICAS), "it may still be asked for"


def test_a_prompt_that_was_lost_goes_back_to_its_replica():
    known = placement()
    prompt = list(range(6))
    known.index.stored("b", prompt)
    known.index.stored("a", prompt[:1])
    known.index.removed("b", prompt[2:])
    assert known.rank([*prompt, 6], REPLICAS)[0] == "b"
    known.begin("c", "1", prompt)
    assert known.loads["c"] == 60, "what is lost is computed"
    known.begin("b", "2", prompt)
    assert known.loads["b"] == 40
    known.end("c", "1")
    known.end("b", "2")
    known.index.stored("c", prompt)
    assert known.rank(prompt, REPLICAS)[0] == "c", "there it is held"


def test_a_call_that_another_replica_takes_moves():
    known = placement()
    known.begin("a", "1", other(5))
    known.move("b", "1")
    assert known.loads == {"a": 0, "b": 50, "c": 0}
    assert (known._work["a"], known._work["b"]) == (0, 50)
    assert known.matches(other(5)) == {"b": 50}
    known.end("a", "1")
    assert known.loads["b"] == 50, "the end of a try that was refused"
    known.end("b", "1")
    known.move("c", "1")
    assert known.loads == {"a": 0, "b": 0, "c": 0}, "word of it may come after its end"


def test_what_many_want_at_once_may_be_copied():
    known = placement(weight=16)
    prompt = list(range(10))
    known.index.stored("a", prompt)
    known.begin("a", "1", [*prompt, *other(20)])
    assert known.rank(prompt, REPLICAS)[0] == "a", "200 tokens of load against 16 times 100"
    known.begin("a", "2", [*prompt, *other(20, 2000)])
    known.begin("b", "3", [*prompt, *other(20, 3000)])
    for number in range(3):
        known.begin("c", f"c{number}", [*prompt, *other(1, 4000 + number)])
    assert known.rank(prompt, REPLICAS)[0] == "c", "six calls have it, so it weighs less than three times 100"
    known.leave("c")
    assert sum(known._hot.values()) == 90, "of the calls that are left"
