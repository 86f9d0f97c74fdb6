"""The scheduler one step ahead, and requests that take turns."""

from __future__ import annotations

from runtime.params import SamplingParams
from tests.runtime.engine.without_model import Engine, prompt

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
    engine.requests["a"].max_tokens = len(engine.requests["a"].tokens) + 1
    assert ahead(engine) == {"b": (5, 1, 1, 1)}
    engine.requests["a"].max_tokens += 1
    assert ahead(engine).keys() == {"a", "b"}


def test_no_step_ahead_where_a_place_may_become_free_or_taken():
    engine = decoding()
    engine.add("c", prompt(3, 3))
    assert ahead(engine) == {}, "it is admitted first"
    engine = decoding(max_running=2)
    engine.add("c", prompt(3, 3))
    assert ahead(engine).keys() == {"a", "b"}, "it cannot be admitted"
    engine.requests["a"].max_tokens = len(engine.requests["a"].tokens) + 1
    assert ahead(engine) == {}, "it can be, as soon as a has ended"


def test_no_step_ahead_where_the_host_is_needed_between_tokens():
    engine = decoding()
    engine.requests["b"].sampling = SamplingParams(regex="a+")
    assert ahead(engine) == {}
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
