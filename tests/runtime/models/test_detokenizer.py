"""Incremental text: nothing lost, nothing waits without need, every step costs the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from runtime.models.tokenizer import Detokenizer, Tokenizer


@pytest.fixture(scope="module")
def byte_ids(tokenizer):
    """The tokens that are one byte which is no character by itself."""
    ids = range(tokenizer.vocab_size)
    return [
        i for i in ids if len(tokenizer.id_to_token(i)) == 1 and "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([i])
    ]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_tokens_add_up_to_their_whole_text(tokenizer, byte_ids, data):
    """Bytes above all, in pieces of any size."""
    ids = data.draw(st.lists(st.sampled_from([*byte_ids, 0, 1, 2, 28120]) | st.integers(0, 49151), max_size=40))
    skip = data.draw(st.booleans())
    detokenizer, text, rest = Detokenizer(tokenizer, skip), "", ids
    while rest:
        count = data.draw(st.integers(1, 4))
        text += detokenizer.push(rest[:count])
        rest = rest[count:]
    assert text + detokenizer.flush() == tokenizer.decode(ids, skip)


class Counting:
    """A tokenizer that records how many tokens each decode takes."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.longest = 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, ids, skip_special_tokens=True):
        self.longest = max(self.longest, len(ids))
        return self._tokenizer.decode(ids, skip_special_tokens)


@pytest.mark.parametrize("kind", ["special", "bytes", "unknown", "words"])
def test_a_step_costs_the_same_however_long_the_text(tokenizer, byte_ids, kind):
    stray = next(i for i in byte_ids if tokenizer.id_to_token(i) == "Ģ")  # 0x80: never begins a character
    token = {"special": 2, "bytes": stray, "unknown": tokenizer.vocab_size + 5, "words": 28120}[kind]
    counting = Counting(tokenizer)
    detokenizer = Detokenizer(counting)
    for _ in range(500):
        detokenizer.push([token])
    assert counting.longest < 12


def test_byte_fallback_waits_for_whole_characters():
    pieces = ["<unk>", "▁a", "b", "<0xF0>", "<0x9F>", "<0x8C>", "<0xB1>", "▁"]
    fast = FastTokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    detokenizer = Detokenizer(Tokenizer(fast, {}, None))
    deltas = [detokenizer.push([i]) for i in [7, 1, 3, 4, 5, 6, 2, 1]]
    assert deltas == ["", " a", "", "", "", "🌱", "b", " a"]
    assert detokenizer.flush() == ""
