"""Compiles grammars in threads. llguidance, which takes a while to import, is imported there for the first grammar."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING

from cachetools import LRUCache

from runtime.errors import InvalidRequest, RametError
from runtime.fair_threads import FairThreads, Piece
from runtime.params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from runtime.features.grammars.grammar import Grammar, Matchers

# Limit for compiling one grammar.
COMPILE_TIMEOUT_S = 30.0
# Number of cached compiled grammars: agents send the same schema repeatedly.
_KEPT = 64


def too_slow(what: str, timeout_s: float, param: str | None = None) -> InvalidRequest:
    return InvalidRequest(f"{what} takes longer than {timeout_s:g} s to compile", param=param)


class GrammarCompiler:
    """Compiles grammars in threads that tenants share fairly, so that no step and no other tenant waits for a grammar.

    Args:
        load_tokenizer: returns the text of the model's tokenizer.json; called for the first grammar.
        vocab_size: number of logits per row.
        eos: tokens that end a sequence.
        timeout_s: limit for compiling one grammar, without the time in the queue.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], str],
        vocab_size: int,
        eos: list[int],
        timeout_s: float = COMPILE_TIMEOUT_S,
    ):
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos = eos
        self._timeout_s = timeout_s
        self._matchers: Matchers | None = None
        self._kept: LRUCache[tuple[Hashable, str], LLMatcher] = LRUCache(_KEPT)
        self._lock = threading.Lock()
        self._threads = FairThreads(2, "ramet-grammar")
        self.open: dict[str, Piece[Grammar]] = {}

    def __len__(self) -> int:
        return len(self.open)

    def start(self, rid: str, params: SamplingParams, tenant: Hashable = "") -> None:
        """Start compiling a request's grammar. The cache is per tenant, because response times reveal hits."""
        self.open[rid] = self._threads.submit(tenant, partial(self._compile, params, tenant))

    def cancel(self, rid: str) -> bool:
        """Forget a request; False if its grammar is not being compiled."""
        found = self.open.pop(rid, None)
        return found is not None and (found.cancel() or True)

    def erase(self, tenant: Hashable) -> None:
        """Forget the compiled grammars of a tenant."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == tenant]:
                del self._kept[key]

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
    def _result(piece: Piece[Grammar]) -> Grammar | RametError:
        try:
            return piece.result()
        except InvalidRequest as error:
            return error
        except Exception as error:
            return RametError(f"the grammar could not be compiled: {type(error).__name__}")

    def _compile(self, params: SamplingParams, tenant: Hashable) -> Grammar:
        from runtime.features.grammars.grammar import Matchers, source_of

        source = source_of(params)
        assert source is not None
        key = (tenant, source)
        with self._lock:
            if self._matchers is None:
                self._matchers = Matchers(self._load_tokenizer(), self._vocab_size, self._eos[0])
            matcher = self._kept.get(key)
        matcher = matcher or self._matchers.compile(source)
        with self._lock:
            self._kept[key] = matcher
            return self._matchers.grammar(matcher.deep_copy(), params.lazy)
