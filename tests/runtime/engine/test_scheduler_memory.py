"""The scheduler: memory and retraction, pins, the step ahead, and turns."""

from array import array

import pytest

from radix import Namespace
from runtime.params import SamplingParams
from tests.runtime.engine.steps import Engine, prompt

# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "priorities", "gives_way"),
    [({"a": 3, "b": 2, "c": 5, "d": 2}, (3, 2, 1, 2), "c"), ({"a": 1, "b": 5, "c": 2, "d": 4}, (0, 0, 0, 0), "c"),
     ({"a": 3, "b": 3, "c": 3, "d": 3}, (0, 0, 0, 0), "d")],
    ids=["the lowest priority, however much it has computed", "of equal priority the fewest own tokens, not the first",
         "of equals the last to come"],
)  # fmt: skip
def test_who_gives_way(lengths, priorities, gives_way):
    engine = Engine(pages=16, prefix_cache=False)
    for (rid, length), priority in zip(lengths.items(), priorities, strict=True):
        engine.add(rid, prompt(ord(rid), length), priority=priority)
    assert engine.steps(2) == [lengths, dict.fromkeys("abcd", 1)]
    assert engine.step() == dict.fromkeys(sorted(lengths.keys() - {gives_way}), 1)
    assert (engine.waiting, engine.scheduler.num_retracted) == (gives_way, 1)


def test_who_gives_way_has_no_row_in_the_step():
    """Two decode before the one for which there is no page: the second has its row taken away."""
    engine = Engine(pages=15, prefix_cache=False)
    engine.add("a", prompt(1, 3), priority=2)
    engine.add("b", prompt(2, 3), priority=1)
    engine.add("c", prompt(3, 4), priority=2)
    engine.scheduler.waiting = type(engine.scheduler.waiting)("fcfs", 0.1, 32, 1)
    for rid in "abc":
        engine.scheduler.waiting.add(engine.requests[rid])
    assert engine.step() == {"a": 3, "b": 3, "c": 4}
    assert engine.running == "abc"
    assert engine.step() == {"a": 1, "b": 1, "c": 1}
    assert engine.step() == {"a": 1, "c": 1}
    assert (engine.running, engine.waiting) == ("ac", "b")


def test_one_that_gives_way_itself_gets_no_row():
    engine = Engine(pages=9, prefix_cache=False)
    engine.add("a", prompt(1, 3))
    engine.add("b", prompt(2, 3))
    engine.steps(2)
    assert engine.step() == {"a": 1}, "and the last page"
    assert engine.waiting == "b"


def test_one_that_gave_way_before_its_first_row_has_none():
    engine = Engine(pages=5, prefix_cache=False)
    engine.add("a", prompt(1, 2), priority=1)
    engine.step()
    engine.add("b", [5])
    first, _ = engine.scheduler.schedule()
    assert engine.running == "ab"
    engine.cache.allocate(1, array("i"), Namespace())
    first.request.lease.book(first, (), 1.0)
    engine.requests["a"].tokens.append(9)
    assert [item.request.rid for item in engine.scheduler.schedule()] == ["a"]
    assert engine.waiting == "b"


def test_a_retracted_request_is_ranked_by_what_it_leaves():
    engine = Engine(schedule_policy="lpm")
    engine.add("a", prompt(1, 4))
    engine.steps(3)
    engine.scheduler._retract(engine.requests["a"])
    assert engine.scheduler.waiting.matched[engine.requests["a"]] == 6


def test_a_retracted_request_keeps_its_tokens_and_finds_them_in_the_tree():
    engine = Engine(pages=16)
    engine.add("a", prompt(1, 4))
    engine.add("b", prompt(2, 4), new=6)
    engine.steps(3)
    engine.scheduler._retract(engine.requests["b"])
    request = engine.requests["b"]
    assert (request.num_output, request.sequence.num_computed, request.segments) == (3, 0, ())
    assert engine.cached(list(request.tokens)) == 6
    assert engine.step() == {"a": 1, "b": 1}, "all but its last token are there"
    assert request.cached_tokens == 0, "those of its first admission"
    engine.scheduler._retract(request)
    assert engine.scheduler.num_retracted == 2


def test_room_is_kept_for_those_who_decode():
    """The next token of each that runs has its page, beside all of the newcomer's."""
    for pages, admitted in ((13, False), (14, True)):
        engine = Engine(pages=pages, prefix_cache=False)
        engine.add("a", prompt(1, 3))
        engine.add("b", prompt(2, 2))
        engine.step()
        engine.add("c", prompt(3, 5))
        assert ("c" in engine.step()) == admitted


def test_after_a_request_has_left_there_is_room():
    engine = Engine(pages=10, prefix_cache=False)
    engine.add("a", prompt(1, 6))
    engine.step()
    engine.add("b", prompt(2, 6))
    assert engine.step() == {"a": 1}
    engine.remove("a")
    assert engine.cache.num_available == 10
    assert engine.step() == {"b": 6}


# -- pins --------------------------------------------------------------------------------------------------------


def pin(engine: Engine, tokens: list[int]) -> None:
    """Compute a prompt and pin it."""
    engine.add("p", tokens, new=1)
    engine.step()
    assert engine.cache.pins.pin(array("i", tokens), Namespace(), None, None) is not None


def test_a_pin_yields_where_nothing_else_can():
    engine = Engine(pages=12, pin_budget=1.0)
    pin(engine, prompt(1, 4))
    pin(engine, prompt(2, 4))
    engine.cache.tree.touch(engine.cache.tree.match(array("i", prompt(1, 4)).tobytes()).node)
    engine.add("a", prompt(3, 8))
    assert engine.step() == {"a": 8}
    assert (engine.cached(prompt(1, 4)), engine.cached(prompt(2, 4))) == (4, 0), "the least recently used one"
    assert (len(engine.cache.pins.pins), engine.cache.pins.num_broken) == (1, 1)


def test_no_pin_yields_while_anything_runs_or_nothing_waits():
    engine = Engine(pages=12, pin_budget=1.0)
    pin(engine, prompt(1, 6))
    assert engine.step() == {}
    engine.add("a", prompt(2, 2))
    engine.step()
    engine.add("b", prompt(3, 5))
    assert engine.step() == {"a": 1}
    assert (engine.waiting, engine.cache.pins.num_broken) == ("b", 0)


def test_no_pin_yields_because_one_that_waits_was_passed_over():
    """Its match has left the tree, so it has lost its turn; whoever is behind it has not."""
    for others, steps in ((("c",), [{"c": 5}, {"c": 1, "b": 9}]), ((), [{}, {"b": 9}])):
        engine = Engine(schedule_policy="lpm", pin_budget=1.0)
        pin(engine, prompt(5, 4))
        engine.add("p", prompt(1, 8), new=1)
        engine.step()
        engine.add("b", [*prompt(1, 8), 5])
        for rid in others:
            engine.add(rid, prompt(3, 5))
        engine.cache.flush()
        assert engine.steps(2) == steps
        assert engine.cache.pins.num_broken == 0


def test_a_request_for_which_no_pin_can_make_room_waits():
    engine = Engine(pages=4)
    engine.add("a", prompt(1, 5))
    assert engine.step() == {}
    assert engine.waiting == "a"


# -- one step ahead ----------------------------------------------------------------------------------------------


def decoding(pages: int = 64, **options) -> Engine:
    """Two requests that decode, booked up to a step whose tokens are not read."""
    engine = Engine(pages=pages, **options)
    engine.add("a", prompt(1, 3), new=4)
    engine.add("b", prompt(2, 3), new=9)
    engine.steps(2)
    engine.work = engine.scheduler.schedule()
    return engine


def ahead(engine: Engine) -> dict[str, tuple[int, int, int, int]]:
    return {
        item.request.rid: (item.start, item.count, item.num_rows, item.ahead)
        for item in engine.scheduler.follow(engine.work)
    }


def test_the_step_behind_a_decode_step():
    engine = decoding()
    assert [item.start for item in engine.work] == [4, 4]
    assert ahead(engine) == {"a": (5, 1, 1, 1), "b": (5, 1, 1, 1)}
    assert [len(engine.requests[rid].sequence.pages) for rid in "ab"] == [3, 3], "pages behind the prompt's"


def test_the_step_behind_the_last_rows_of_a_prompt():
    engine = Engine(chunk_tokens=4)
    engine.add("a", prompt(1, 3))
    engine.step()
    engine.add("b", prompt(2, 6))
    engine.work = engine.scheduler.schedule()
    assert ahead(engine) == {}, "b has two more rows"
    engine.step()
    engine.work = engine.scheduler.schedule()
    assert {item.request.rid: item.count for item in engine.work} == {"a": 1, "b": 2}
    assert ahead(engine) == {"a": (5, 1, 1, 1), "b": (6, 1, 1, 1)}
    assert len(engine.requests["b"].sequence.pages) == 3, "two of the prompt, and one for its token"


def test_no_step_ahead_of_who_waits_for_the_rows_of_a_prompt():
    engine = Engine()
    engine.add("a", prompt(1, 8))
    engine.add("b", [*prompt(1, 8), 5])
    engine.work = engine.scheduler.schedule()
    assert engine.blocked == "b"
    assert ahead(engine) == {}


def test_a_step_ahead_takes_a_page_only_where_it_needs_one():
    for length, pages in ((2, 1), (3, 2)):
        engine = Engine(page_size=4)
        engine.add("a", prompt(1, length))
        engine.step()
        engine.work = engine.scheduler.schedule()
        assert ahead(engine) == {"a": (length + 1, 1, 1, 1)}
        assert len(engine.requests["a"].sequence.pages) == pages


def test_whoever_ends_with_the_unread_token_is_left_out():
    engine = decoding()
    engine.requests["a"].max_length = len(engine.requests["a"].tokens) + 1
    assert ahead(engine) == {"b": (5, 1, 1, 1)}
    engine.requests["a"].max_length += 1
    assert ahead(engine).keys() == {"a", "b"}


def test_no_step_ahead_where_a_place_may_become_free_or_taken():
    engine = decoding()
    engine.add("c", prompt(3, 3))
    assert ahead(engine) == {}, "it is admitted first"
    engine = decoding(max_running=2)
    engine.add("c", prompt(3, 3))
    assert ahead(engine).keys() == {"a", "b"}, "it cannot be admitted"
    engine.requests["a"].max_length = len(engine.requests["a"].tokens) + 1
    assert ahead(engine) == {}, "it can be, as soon as a has ended"


def test_no_step_ahead_where_the_host_is_needed_between_tokens():
    engine = decoding()
    engine.requests["b"].sampler.params = SamplingParams(regex="a+")
    assert ahead(engine).keys() == {"a", "b"}, "only the choice of its token needs the host"
    engine = decoding()
    engine.work = engine.work[:1]
    assert ahead(engine) == {}, "b has no row in this step"
    engine = Engine(chunk_tokens=2)
    engine.add("a", prompt(1, 3))
    engine.work = engine.scheduler.schedule()
    assert ahead(engine) == {}, "it prefills"
    engine = Engine()
    engine.add("a", [5], prompt_logprobs_from=0)
    engine.work = engine.scheduler.schedule()
    assert ahead(engine) == {}


def test_no_step_ahead_without_memory_for_it():
    assert ahead(decoding(pages=12, prefix_cache=False)).keys() == {"a", "b"}
    assert ahead(decoding(pages=11, prefix_cache=False)) == {}


def test_whoever_waits_for_memory_holds_up_no_step_until_there_may_be_some():
    engine = Engine(pages=24, prefix_cache=False)
    engine.add("a", prompt(1, 3), new=9)
    engine.add("b", prompt(2, 3), new=9)
    engine.step()
    engine.add("c", prompt(3, 20))
    engine.work = engine.scheduler.schedule()
    assert ahead(engine).keys() == {"a", "b"}
    engine.add("d", prompt(4, 2))
    assert ahead(engine) == {}, "the newcomer may fit"
    engine.work = engine.scheduler.schedule()
    engine.remove("d")
    engine.work = engine.scheduler.schedule()
    assert ahead(engine).keys() == {"a", "b"}
    engine.remove("b")
    engine.work = engine.work[:1]
    assert ahead(engine) == {}, "its pages are free"


def test_those_behind_one_that_waited_for_memory_are_looked_at_when_it_has_left():
    engine = Engine(pages=24, prefix_cache=False)
    engine.add("a", prompt(1, 3), new=9)
    engine.step()
    engine.add("c", prompt(3, 23))
    engine.add("d", prompt(4, 2))
    engine.work = engine.scheduler.schedule()
    assert ahead(engine).keys() == {"a"}
    engine.remove("c")
    assert ahead(engine) == {}, "d fits"


def test_whoever_waits_for_memory_is_looked_at_again_when_a_pin_has_left():
    engine = Engine(pages=24, pin_budget=1.0)
    pin(engine, prompt(9, 10))
    engine.add("a", prompt(1, 3), new=20)
    engine.step()
    engine.add("c", prompt(3, 10))
    engine.work = engine.scheduler.schedule()
    assert ahead(engine).keys() == {"a"}
    engine.cache.pins.unpin_all()
    assert ahead(engine) == {}


# -- turns -------------------------------------------------------------------------------------------------------


def test_requests_that_cannot_be_cut_take_turns():
    engine = Engine(step_tokens=10)
    for rid in "abcde":
        engine.add(rid, prompt(ord(rid), 4), strategy=engine.in_turns)
    shares = engine.steps(5)
    assert [sorted(rows) for rows in shares] == [["a", "b"], ["c", "d"], ["a", "e"], ["b", "c"], ["a", "d"]]
    assert all(rows == dict.fromkeys(rows, 4) for rows in shares)


def test_whoever_is_larger_than_a_step_has_its_turn_alone():
    engine = Engine(step_tokens=10)
    for rid, length in {"a": 11, "b": 4, "c": 6, "d": 3}.items():
        engine.add(rid, prompt(ord(rid), length), strategy=engine.in_turns)
    assert engine.steps(4) == [{"a": 11}, {"b": 4, "c": 6}, {"d": 3, "b": 4}, {"a": 11}]


def test_what_fits_behind_one_that_does_not_has_its_turn():
    engine = Engine(step_tokens=10)
    for rid, length in {"a": 5, "b": 6, "c": 5}.items():
        engine.add(rid, prompt(ord(rid), length), strategy=engine.in_turns)
    assert engine.steps(3) == [{"a": 5, "c": 5}, {"b": 6}, {"a": 5, "c": 5}]


def test_turns_have_the_rows_that_others_leave():
    engine = Engine(step_tokens=10)
    engine.add("a", prompt(1, 3))
    engine.add("b", prompt(2, 8), strategy=engine.in_turns)
    engine.add("c", prompt(3, 7), strategy=engine.in_turns)
    assert engine.step() == {"a": 3, "c": 7}
    assert engine.step() == {"a": 1, "b": 8}
    assert engine.in_turns.limits == [7, 7, 9, 1]
    engine.add("d", prompt(4, 30))
    assert engine.step() == {"a": 1, "d": 9}, "with work for the device nobody exceeds the budget"


def test_turns_need_no_rows_to_be_admitted_and_take_none_from_others():
    engine = Engine(step_tokens=4, max_running=3)
    engine.add("a", prompt(1, 4))
    engine.add("b", prompt(2, 4), strategy=engine.in_turns)
    engine.add("c", prompt(3, 4))
    assert engine.step() == {"a": 4}
    assert (engine.running, engine.waiting) == ("ab", "c")
    assert engine.step() == {"a": 1, "c": 3}
