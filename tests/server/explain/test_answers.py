"""Earlier prompts: who finds them, for how long, how many; and prompts that keep parting at one early place."""

from __future__ import annotations

import random
from array import array

import pytest

from radix import Namespace
from runtime.frontend.output import Submission
from server.explain import answers
from server.explain.answers import Answers, Asked


class Store:
    def __init__(self):
        self.now = 0.0
        self.answers = Answers(lambda: self.now)

    def add(self, rid: str, tokens, account: str = "alice", salt: str = ""):
        given = Submission(prompt=[], rid=rid, account=account, namespace=Namespace(account, salt))
        given.tokens = array("i", tokens).tobytes()
        return self.answers.add(given)

    def known(self, account: str = "alice") -> list[str]:
        return [str(i) for i in range(100) if self.answers.find(account, str(i))]


def test_an_answer_is_found_by_its_account_alone_with_any_routes_prefix():
    store = Store()
    store.add("ab12", [1, 2, 3], salt="s")
    expected = Asked(Namespace("alice", "s"), array("i", [1, 2, 3]).tobytes(), 0.0)
    for name in ("ab12", "chatcmpl-ab12", "cmpl-ab12", "resp_ab12", "msg_ab12"):
        assert store.answers.find("alice", name) == expected
    assert store.answers.find("bob", "ab12") is None
    assert store.answers.find("alice", "chatcmpl-resp_ab12") is None
    store.add("cmpl-own", [4])
    assert store.answers.find("alice", "cmpl-own").tokens == array("i", [4]).tobytes()
    store.add("ab12", [5])
    assert store.answers.find("alice", "ab12").tokens == array("i", [5]).tobytes(), "the latest of an id"


def test_answers_are_forgotten_after_an_hour_also_of_accounts_that_ask_no_more():
    store = Store()
    store.add("0", [1], "bob")
    store.add("1", [1])
    store.now = 3599.0
    assert (store.known(), store.known("bob")) == (["1"], ["0"])
    store.now = 3600.0
    assert (store.known(), store.known("bob")) == ([], [])
    store.add("2", [1])
    assert (store.known(), store.answers._weights) == (["2"], {"alice": 64, "bob": 0})


def test_an_account_displaces_its_own_and_the_largest_gives_way_when_all_are_full(monkeypatch):
    monkeypatch.setattr(answers, "MOST_OF_ACCOUNT", 1000)
    monkeypatch.setattr(answers, "MOST_TOKENS", 1800)
    store = Store()
    for i in range(4):
        store.add(str(i), [1] * 400)
    assert store.known() == ["2", "3"]
    store.add("4", [1] * 1001)
    assert store.known() == [], "one that is too large is not kept, either"
    for i in range(5, 7):
        store.add(str(i), [1] * 500)
        store.add(str(i), [1] * 300, "bob")
    assert (store.known(), store.known("bob")) == (["5", "6"], ["5", "6"])
    store.add("7", [1] * 300, "carol")
    assert (store.known(), store.known("bob"), store.known("carol")) == (["6"], ["5", "6"], ["7"])
    store = Store()
    for i in range(30):
        store.add(str(i), [1])
    assert len(store.known()) == 1000 // 64, "short ones count, too"


LONG = list(range(1000, 1400))


def habit(store, prompts, **options):
    return [found and (found.token, found.times, found.new) for found in (store.add(f"{i}-{p[:3]}", p, **options)
            for i, p in enumerate(prompts))]  # fmt: skip


def test_a_habit_is_told_at_the_fourth_parting_at_one_early_place():
    dated = [[1, 2, 3, 50 + day, 60 + day, *LONG] for day in range(7)]
    store = Store()
    assert habit(store, dated) == [None] * 4 + [(3, 4, True), (3, 5, False), (3, 6, False)]
    assert habit(store, dated[:1], salt="other") == [None], "of one namespace"
    assert habit(store, dated[:1], account="bob") == [None]


@pytest.mark.parametrize("seed", range(3))
def test_what_parts_early_for_good_is_no_habit(seed):
    draw = random.Random(seed)
    fresh = [[1, 2, 3, *(draw.randrange(50000) for _ in range(400))] for _ in range(12)]
    assert habit(Store(), fresh) == [None] * 12, "other questions behind a short system prompt"
    turns = [[*LONG[: 20 * turn]] for turn in range(1, 12)]
    assert habit(Store(), turns) == [None] * 11, "turns of a conversation"
    late = [[*LONG, 7 + i, *LONG[:150]] for i in range(12)]
    assert habit(Store(), late) == [None] * 12, "behind the middle"
    short = [[1, 2, 50 + i, *LONG[:120]] for i in range(12)]
    assert habit(Store(), short) == [None] * 12, "little is lost"
    assert habit(Store(), [[1, *LONG]] * 12) == [None] * 12, "the same prompt"


def test_places_far_apart_in_time_or_elsewhere_are_no_habit():
    store, draw = Store(), random.Random(1)
    for i in range(60):
        at = draw.randrange(2, 150)
        store.add(f"a{i}", [*range(at), 2000 + i, *LONG])
    places = store.answers._places[Namespace("alice")]
    assert len(places) <= 16
    mixed = [[1, 2, 3, 50 + day, *LONG] if day % 2 else [9, 50 + day, *LONG] for day in range(14)]
    told = [found for found in habit(Store(), mixed) if found]
    assert {token for token, _, _ in told} == {1, 3}, "two prompts of one tenant, in turn"


def test_a_long_changing_line_is_seen_through():
    lines = [[1, 2, *range(5000 + 100 * i, 5040 + 100 * i), *LONG] for i in range(6)]
    assert habit(Store(), lines)[-1] == (2, 5, False)


def test_namespaces_are_bounded(monkeypatch):
    monkeypatch.setattr(answers, "_MOST_NAMESPACES", 3)
    store = Store()
    for salt in "abcde":
        habit(store, [[1, 50 + i, *LONG] for i in range(2)], salt=salt)
    assert [space.salt for space in store.answers._places] == ["c", "d", "e"]
