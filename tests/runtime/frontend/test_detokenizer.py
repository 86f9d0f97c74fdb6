"""Text of tokens as they come: whole characters, no part of a stop string, nothing lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.frontend.output_processor import TextStream
from runtime.models.tokenizer import Detokenizer
from runtime.params import SamplingParams

TEXTS = [
    "Grüße, 世界! 🌱🌳 done",
    "👩‍👩‍👧‍👦 family",
    "e\u0301 combining",
    "plain",
    "日本語のテキスト",
    "a\n\n\tb",
    "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
]


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_are_whole_characters_and_add_up(tokenizer, text):
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push([token]) for token in ids]
    deltas.append(detokenizer.flush())
    assert "".join(deltas) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in delta for delta in deltas)


def test_the_stop_string_that_comes_first_ends_the_text(tokenizer):
    stream = TextStream(tokenizer, SamplingParams(stop=["9", "7"]))
    stream.push(tokenizer.encode("6 7 8 9"), last=True)
    assert (stream.text, stream.stopped) == ("6 ", "7")


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="abcX🌱", max_size=40),
    st.lists(st.text(alphabet="abcX🌱", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings_never_leak(tokenizer, text, stops, keep):
    ids = tokenizer.encode(text)
    text = tokenizer.decode(ids)
    stream = TextStream(tokenizer, SamplingParams(stop=stops, no_stop_trim=keep))
    shown = ""
    for i, token in enumerate(ids):
        shown += stream.push([token], last=i == len(ids) - 1)
        assert shown == stream.text
        if not keep:
            assert not any(stop in shown for stop in stops)
        if stream.stopped is not None:
            break
    ends = [text.find(stop) for stop in stops if stop in text]
    if not ends:
        assert (shown, stream.stopped) == (text, None)
        return
    assert stream.stopped in stops
    if not keep:
        assert text.startswith(shown + stream.stopped)
    else:
        assert shown.endswith(stream.stopped)
