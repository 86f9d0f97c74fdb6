"""Grammars that constrain the output (JSON schema, regular expression, EBNF, Lark), by llguidance."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from runtime.errors import InvalidRequest
from runtime.features.grammars.expressions import ascii_classes, ascii_classes_in_lark
from runtime.json_text import parse_schema
from runtime.params import Lazy, SamplingParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Far above the needs of real schemas; no grammar delays a step by more than milliseconds.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)

# A small model that may write white space anywhere may write nothing else.
_JSON: JsonCompileOptions = {"whitespace_pattern": r"[ \n]?"}

_MAX_MESSAGE = 300

# Tokens of one byte each, with which any grammar can be tried, and llguidance's error for one without a first byte.
_BYTES = LLTokenizer("byte")
_NO_TEXT = "NoExtensionBias"

# Most bytes at the start of the output in which a trigger is searched that must stand there.
_MOST_HELD = 1024


def check_grammar(params: SamplingParams) -> None:
    """Raise InvalidRequest for a schema or an expression that cannot be compiled within the limits."""
    name, source = params.constraint, source_of(params)
    if source is None:
        return
    if problem := LLMatcher.validate_grammar(source, limits=_LIMITS):
        if problem.startswith("WARNING"):
            return
        raise InvalidRequest(f"{name} cannot be followed: {_reason(problem)}", param=name)
    matcher = LLMatcher(_BYTES, source, limits=_LIMITS)
    matcher.compute_bitmask()
    if _NO_TEXT in matcher.get_error():
        said = "no text matches it; an expression or a class in it may be empty, as [a&&b] is"
        raise InvalidRequest(f"{name} cannot be followed: {said}", param=name)


def source_of(params: SamplingParams) -> str | None:
    """llguidance's source of the request's grammar, if any. Raises InvalidRequest if it cannot be read."""
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(ascii_classes(params.regex))
    if params.grammar is not None:
        try:
            return LLMatcher.grammar_from_lark(ascii_classes_in_lark(any_to_lark(params.grammar)))
        except Exception as error:  # the library raises various exceptions
            message = f"grammar is neither EBNF nor Lark: {_reason(str(error))}"
            raise InvalidRequest(message, param="grammar") from None
    if params.json_schema is None:
        return None
    try:
        return LLMatcher.grammar_from_json_schema(parse_schema(params.json_schema), overrides=_JSON)
    except ValueError:
        raise InvalidRequest("json_schema has an integer of more than 64 bits", param="json_schema") from None


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("error: ")]  # a regex is drawn before its reason
    return " ".join([*lines[:1], *reasons[:1]])[:_MAX_MESSAGE]


class Grammar:
    """The state of one request in its grammar."""

    may_refuse = False

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher

    def allowed(self) -> np.ndarray | None:
        """See `OutputGrammar`. Raises InvalidRequest at a dead end or a limit."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be followed further: {_reason(self._matcher.get_error())}")
        return bits

    def accept(self, token: int) -> bool:
        """Advance by an allowed token; False if another token must be chosen."""
        self._matcher.consume_token(token)
        return True

    @property
    def complete(self) -> bool:
        """Whether no token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


class LazyGrammar(Grammar):
    """A grammar that constrains the output from a trigger on; before, every token may follow.

    A trigger may end within a token, so the grammar reads the bytes from the trigger on. After a limit of the parser is
    exceeded, the rest of the output is unconstrained.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, lazy: Lazy):
        super().__init__(matcher)
        self._tokenizer = tokenizer
        self._to_end = lazy.to_end
        self._starts, self._triggers = ([text.encode() for text in texts] for texts in (lazy.starts, lazy.triggers))
        self._longest = max(map(len, self._triggers), default=1)
        self._held = b""  # the latest bytes, which may contain the start of a trigger
        self._holds = False

    def allowed(self) -> np.ndarray | None:
        try:
            return super().allowed() if self._holds else None
        except InvalidRequest:
            self._holds, self._starts, self._triggers = False, [], []
            return None

    def accept(self, token: int) -> bool:
        if self._holds:
            super().accept(token)
            self._holds = self._to_end or not self._matcher.is_stopped()
            return True
        text = self._held + self._tokenizer.decode_bytes([token])
        start, end = self._find(text)
        if start < 0:
            self._held = text if self._starts else text[max(len(text) - self._longest + 1, 0) :]
        elif self._begins(text[start:]):
            self._to_end = self._to_end or bool(self._starts)
            self._holds, self._held = self._to_end or not self._matcher.is_stopped(), b""
        elif end < len(text) and self._begins(text[start:end]):
            return False  # the bytes after the trigger violate the grammar
        elif self._starts:
            self._starts = []
        else:
            self._triggers = []
        return True

    @property
    def may_refuse(self) -> bool:  # type: ignore[override]
        return not self._holds

    @property
    def complete(self) -> bool:
        return self._holds and super().complete

    def _find(self, text: bytes) -> tuple[int, int]:
        """Start and end of the first trigger in a text; (-1, -1) if there is none, or its start is undecided."""
        if self._starts:
            dense = b"".join(text.split())
            if any(dense.startswith(start) for start in self._starts):
                return 0, len(text)
            if len(text) <= _MOST_HELD and any(start.startswith(dense) for start in self._starts):
                return -1, -1
            self._starts = []
        places = [(text.find(trigger), len(trigger)) for trigger in self._triggers]
        start, length = min(((at, length) for at, length in places if at >= 0), default=(-1, 0))
        return start, start + length

    def _begins(self, text: bytes) -> bool:
        """Whether the grammar accepts a text as a prefix; if so, it continues after it."""
        self._matcher.reset()
        tokens = self._tokenizer.tokenize_bytes(text)
        return self._matcher.try_consume_tokens(tokens) == len(tokens)


class _Speller:
    """A tokenizer for llguidance that spells the texts of special tokens, because a literal of a grammar is text.

    With a special token in place of such a text, llguidance cannot follow its own mask.
    """

    bos_token_id = None

    def __init__(self, base: LLTokenizer, eos: int):
        self._base, self.eos_token_id = base, eos
        self.tokens = [base.decode_bytes([token]) for token in range(base.vocab_size)]
        self.special_token_ids = [token for token in range(base.vocab_size) if base.is_special_token(token)]
        texts = sorted((self.tokens[token] for token in self.special_token_ids), key=len, reverse=True)
        self._special = re.compile(b"|".join(map(re.escape, filter(None, texts))) or b"(?!)")

    def __call__(self, text: bytes) -> list[int]:
        cuts = [found.start() + 1 for found in self._special.finditer(text)]
        parts = (text[start:end] for start, end in pairwise([0, *cuts, len(text)]))
        return [token for part in parts for token in self._base.tokenize_bytes(part)]


class Matchers:
    """Makes llguidance's matchers for a model.

    Args:
        tokenizer: the text of the model's tokenizer.json.
        vocab_size: number of logits per row.
        eos: the token that ends a sequence.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos: int):
        speller = _Speller(LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos), eos)
        self._tokenizer = LLTokenizer(TokenizerWrapper(speller), n_vocab=vocab_size, eos_token=eos)

    def compile(self, source: str) -> LLMatcher:
        """The matcher of a source, see `source_of`. Raises InvalidRequest."""
        matcher = LLMatcher(self._tokenizer, source, limits=_LIMITS, log_level=0)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be followed: {_reason(matcher.get_error())}")
        return matcher

    def grammar(self, matcher: LLMatcher, lazy: Lazy | None) -> Grammar:
        """The state of a request at its start. `matcher`: its own."""
        return Grammar(matcher) if lazy is None else LazyGrammar(matcher, self._tokenizer, lazy)
