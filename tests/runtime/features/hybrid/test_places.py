"""Where points are stored, and which kind of them is given up."""

from array import array
from itertools import product

from runtime.features.hybrid.places import Uses, choose, ends_of_turns, least_saving

COST = 1600  # 100 tokens must be saved


def places(begin=0, end=0, turns=(), asked=(), shared=0, most=None) -> list[int]:
    return choose(begin, end, turns, asked, shared, COST, most or end + 1)


def test_turns_end_behind_their_last_token():
    assert ends_of_turns(array("i", [7, 2, 5, 3, 2, 9]), {2, 3}) == [2, 4, 5]
    assert ends_of_turns(array("i", [7, 9]), {2}) == []


def test_the_last_turn_the_first_and_the_end_unless_another_place_is_near():
    assert least_saving(COST) == 100
    assert places(end=3000, turns=[700, 1500, 2990]) == [700, 2990]
    assert places(end=3000, turns=[700, 1500, 2800]) == [700, 2800, 3000]
    assert places(begin=2800, end=3000, turns=[700, 1500, 2850]) == [3000]
    assert places(end=80) == [], "it saves too little"
    assert least_saving(7) == 1


def test_what_is_asked_for_and_where_prompts_part():
    assert places(end=3000, turns=[2990], asked=[10, 2985]) == [10, 2985]
    assert places(begin=10, end=3000, turns=[2990], asked=[10, 3000]) == [2990, 3000]
    assert places(end=3000, turns=[2990], shared=1234) == [1234, 2990]
    assert places(end=3000, turns=[2990], shared=3001) == [2990]


def test_every_place_asked_for_behind_the_beginning_is_there_up_to_the_last_token():
    for begin, place in product(range(4), range(6)):
        found = choose(begin, 3, [], [place], 0, COST, 4)
        assert found == ([place] if begin < place <= 4 else []), (begin, place)


def test_long_prompts_have_places_at_doublings():
    assert places(end=30000) == [6400, 12800, 25600, 30000]
    assert places(end=30000, turns=[12790, 29990]) == [6400, 12790, 25600, 29990]


def test_a_kind_that_is_rarely_used_is_in_vain_until_that_changes():
    uses = Uses()
    assert uses.vain() == ""
    for _ in range(30):
        uses.stored("prompt")
        uses.stored("answer")
        uses.stored("")
        uses.used("answer")
        uses.used("")
    assert uses.vain() == "prompt"
    for _ in range(600):
        uses.stored("prompt")
        uses.stored("answer")
        uses.used("prompt")
    assert uses.vain() == "answer"
