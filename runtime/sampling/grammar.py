"""Grammars that constrain the output (JSON schema, regular expression, EBNF, Lark), compiled by llguidance."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from runtime.errors import InvalidRequest, RametError
from runtime.params import SamplingParams
from runtime.sampling.json_text import parse_json
from runtime.sampling.turns import Piece, Turns

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Far above the needs of real schemas, and low enough that no grammar delays a step by more than milliseconds.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)

# A small model that may put white space anywhere may generate nothing else.
_JSON: JsonCompileOptions = {"whitespace_pattern": r"[ \n]?"}

# Size of the cache of compiled grammars: agents send the same schema again and again.
_KEPT = 64

_MAX_MESSAGE = 300


def check_grammar(params: SamplingParams) -> None:
    """Raise InvalidRequest for a schema or an expression that cannot be compiled within the limits."""
    name, source = params.constraint, _source(params)
    if source is None:
        return
    if problem := LLMatcher.validate_grammar(source, limits=_LIMITS):
        if problem.startswith("WARNING"):
            return
        raise InvalidRequest(f"{name} cannot be followed: {_first_line(problem)}", param=name)


def too_slow(what: str, timeout_s: float, param: str | None = None) -> InvalidRequest:
    return InvalidRequest(f"{what} takes longer than {timeout_s:g} s to compile", param=param)


def _source(params: SamplingParams) -> str | None:
    """llguidance's source of the request's grammar, if any. Raises InvalidRequest if it cannot be read."""
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        try:
            return LLMatcher.grammar_from_lark(any_to_lark(params.grammar))
        except Exception as error:  # the library has no rule of which
            message = f"grammar is neither EBNF nor Lark: {_first_line(str(error))}"
            raise InvalidRequest(message, param="grammar") from None
    if params.json_schema is None:
        return None
    try:
        schema = parse_json(params.json_schema)
        if not isinstance(schema, dict):
            raise ValueError
    except ValueError:
        raise InvalidRequest("json_schema must be the text of a JSON object", param="json_schema") from None
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)
    except ValueError:
        raise InvalidRequest("json_schema has an integer of more than 64 bits", param="json_schema") from None


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:_MAX_MESSAGE]


class Grammar:
    """The state of one request in its grammar."""

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher

    def forbidden(self, vocab_size: int) -> np.ndarray:
        """Tokens that may not follow, bool [vocab]. Raises InvalidRequest at a dead end or a limit."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be followed further: {_first_line(self._matcher.get_error())}")
        return np.unpackbits(bits, bitorder="little", count=vocab_size) == 0

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether no token may follow."""
        return self._matcher.is_stopped()


class GrammarCompiler:
    """Compiles in threads, in which tenants take turns, so that neither a step nor another tenant waits for a grammar.

    Args:
        load_tokenizer: returns the text of the model's tokenizer.json; called for the first grammar.
        vocab_size: of the logits.
        eos: tokens that end a sequence.
        timeout_s: limit for compiling one grammar; the time before its turn does not count.
    """

    def __init__(self, load_tokenizer: Callable[[], str], vocab_size: int, eos: list[int], timeout_s: float):
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos = eos
        self._timeout_s = timeout_s
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[Hashable, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._turns = Turns(2, "ramet-grammar")
        self.open: dict[str, Piece[LLMatcher]] = {}

    def __len__(self) -> int:
        return len(self.open)

    def start(self, rid: str, params: SamplingParams, tenant: Hashable = "") -> None:
        """Begin to compile a request's grammar. The cache is per tenant: a hit is visible in the response time."""
        self.open[rid] = self._turns.submit(tenant, lambda: self._compile(params, tenant))

    def cancel(self, rid: str) -> bool:
        """Forget a request; False if its grammar is not being compiled."""
        found = self.open.pop(rid, None)
        return found is not None and (found.cancel() or True)

    def take(self) -> list[tuple[str, Grammar | RametError]]:
        """Remove the requests whose grammar is compiled or has failed."""
        done: list[tuple[str, Grammar | RametError]] = []
        for rid, piece in list(self.open.items()):
            if piece.done():
                done.append((rid, self._result(piece)))
            elif piece.began_s is not None and time.monotonic() > piece.began_s + self._timeout_s:
                done.append((rid, too_slow("the grammar", self._timeout_s)))
            else:
                continue
            del self.open[rid]
        return done

    @staticmethod
    def _result(piece: Piece[LLMatcher]) -> Grammar | RametError:
        try:
            matcher = piece.result()
        except Exception as error:
            return RametError(f"the grammar could not be compiled: {type(error).__name__}")
        if matcher.is_error():
            return InvalidRequest(f"the grammar cannot be followed: {_first_line(matcher.get_error())}")
        return Grammar(matcher)

    def _compile(self, params: SamplingParams, tenant: Hashable) -> LLMatcher:
        source = _source(params)
        assert source is not None
        key = (tenant, source)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(self._load_tokenizer(), n_vocab=self._vocab_size, eos_token=self._eos)
            matcher = self._kept.get(key)
        matcher = matcher or LLMatcher(self._tokenizer, source, limits=_LIMITS, log_level=0)
        with self._lock:
            self._kept[key] = matcher
            self._kept.move_to_end(key)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return matcher.deep_copy()
