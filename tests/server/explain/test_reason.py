"""Explanations as OpenAI's and Anthropic's APIs have them, and partings of prompts."""

from array import array
from types import SimpleNamespace
from typing import get_args

import pytest

from radix import Namespace, WhyGone
from radix.stats import Cause
from runtime.frontend.output import Output
from runtime.protocol import Lookup
from server.auth.keys import PUBLIC
from server.explain.answers import Answers
from server.explain.compare import compare, find_parting
from server.explain.conversation import PromptSection
from server.explain.reason import DIFFER, LEFT, Explanation, Reason
from server.explain.report import MissReport


def ids(tokenizer, *texts: str) -> bytes:
    return array("i", [token for text in texts for token in tokenizer.encode(text)]).tobytes()


def test_every_cause_and_part_has_a_reason():
    causes = {*get_args(Cause), *(one for one in get_args(WhyGone) if isinstance(one, str)), "expired"}
    assert set(LEFT) == causes
    assert {reason for reason, _ in LEFT.values()} | {*DIFFER.values()} < {*get_args(Reason)}
    assert set(DIFFER) == {"tools", "system", "message", "prompt"}


def test_types_of_other_apis(tokenizer):
    parting = compare(tokenizer, ids(tokenizer, "One two three"), ids(tokenizer, "One two four"), None)

    def told(reason: Reason, **more) -> tuple[dict, dict | None]:
        found = Explanation(reason, "because", 100, 30, **more)
        return found.openai(), found.anthropic()

    missed = {"type": "cache_miss", "cache_missed_tokens": 70, "comparison_reusable_tokens": parting.token}
    for reason, openai, anthropic in (
        ("tools_differ", "tools_changed", "tools_changed"),
        ("system_differs", "input_changed", "system_changed"),
        ("messages_differ", "input_changed", "messages_changed"),
        ("prompt_differs", "input_changed", "messages_changed"),
    ):
        expected = {"cache_miss_reason": {"type": anthropic, "cache_missed_input_tokens": 70}}
        assert told(reason, parting=parting) == (missed | {"reason": openai}, expected)
    assert told("hit") == ({"type": "cache_hit"}, None)
    not_found = {"cache_miss_reason": {"type": "previous_message_not_found"}}
    assert told("comparison_not_found") == ({"type": "comparison_response_not_found"}, not_found)
    for reason in ("evicted", "expired", "flushed", "other_salt", "too_short", "not_stored", "not_read", "never_here"):
        assert told(reason) == ({"type": "unavailable"}, {"cache_miss_reason": {"type": "unavailable"}})


def test_the_same_text_in_other_tokens_has_two_empty_sides(tokenizer):
    whole, cut = ids(tokenizer, "I like toma", "toes"), ids(tokenizer, "I like tomatoes")
    parting = compare(tokenizer, whole, cut, None)
    assert parting.token < len(cut) // 4
    other = compare(tokenizer, ids(tokenizer, "I like tom", "atoes"), cut, None)
    assert (other.here, other.there) == ("", "")
    assert other.before.endswith("I like tomatoes")


def test_the_place_is_that_of_the_first_other_character(tokenizer):
    parting = compare(tokenizer, ids(tokenizer, "At noon on"), ids(tokenizer, "At noontide"), None)
    assert (parting.before, parting.offset, parting.part) == ("At noon", 7, PromptSection("prompt"))
    assert (parting.here, parting.there) == (" on", "tide")
    hidden = find_parting(tokenizer, ids(tokenizer, "At noon on"), 1, None, None)
    assert (hidden.before, hidden.here, hidden.there) == ("At", " noon on", None)
    assert hidden.describe() == {
        "token": 1,
        "part": "prompt",
        "offset": 2,
        "before": "At",
        "here": " noon on",
        "there": None,
    }


@pytest.mark.parametrize(("tenant", "here", "there"), [("alice", "on", "by"), (PUBLIC, " on", None)])
def test_the_prompt_of_another_key_behind_public_pages_stays_secret(tokenizer, tenant, here, there):
    prompt, other = ids(tokenizer, "At noon on"), ids(tokenizer, "At noon by")
    lookup = Lookup(found=2, readable=2, page_size=1, other=other[8:])
    submission = SimpleNamespace(account="alice", tokens=prompt, namespace=Namespace(tenant))
    output = Output(0, 0, "r", prompt_tokens=len(prompt) // 4 + 1, cached_tokens=2, lookup=lookup)
    told = MissReport(tokenizer, Answers(), "alice")._explain(submission, output)
    assert (told.reason, told.parting.here, told.parting.there) == ("prompt_differs", here, there)


def test_long_prompts_show_little(tokenizer):
    shared = "one two three four five six seven " * 20
    parting = compare(tokenizer, ids(tokenizer, shared, "a " * 99), ids(tokenizer, shared, "b " * 99), None)
    assert len(parting.before) < 100 > len(parting.here)
    assert parting.offset == len(shared)
