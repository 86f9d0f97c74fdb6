"""The `reasoncache` strategy: prefix caching that also shares pages of repeated reasoning steps (ReasonCache)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from runtime.errors import InvalidRequest
from runtime.execution.executor import Executor
from runtime.features.reasoning.ask import METHOD, ReasoningAsk, ReasoningReport
from runtime.features.reasoning.background import Background
from runtime.features.reasoning.distance import Distances
from runtime.features.reasoning.filtering import CollaborativeFilter, PageMatch, StepHistory
from runtime.features.reasoning.reservoir import Reservoir
from runtime.kv.cache import PagedCache
from runtime.models.tokenizer import Tokenizer
from runtime.request import Found, Request, Work
from runtime.reuse.prefix import PrefixLease, PrefixStrategy


@dataclass(slots=True, eq=False)
class Reasoning:
    """The state of a request whose reasoning steps are compared.

    Attributes:
        history: the steps since the admission, for the filter's thread; None while the request is not admitted.
        substituted: indices of pages that were replaced by earlier pages since the admission.
        num_full: number of full pages when the filter last got tokens.
        num_given: number of output tokens that the filter got since the admission.
        first_substituted: index of the output token at which the first page ever replaced begins; None: no page was.
        exact_tokens: number of output tokens that were chosen before the first substitution; None: no substitution.
        num_recomputed: number of admissions that recomputed substituted pages exactly.
        reported: number of substituted pages and of all pages in the last report.
    """

    params: ReasoningAsk
    history: StepHistory | None = None
    substituted: set[int] = field(default_factory=set)
    num_full: int = 0
    num_given: int = 0
    first_substituted: int | None = None
    exact_tokens: int | None = None
    num_recomputed: int = 0
    reported: tuple[int, int] = (-1, -1)


class ReasoningLease(PrefixLease):
    """Replaces pages of the request's reasoning steps by similar pages of its earlier steps."""

    strategy: ReasonCache

    def __init__(self, strategy: ReasonCache, request: Request, ask: ReasoningAsk):
        super().__init__(strategy, request)
        self.reasoning = Reasoning(ask)

    def admit(self, found: Found, headroom: int) -> bool:
        request = self.request
        if not super().admit(found, headroom):
            return False
        reasoning = self.reasoning
        reasoning.history = StepHistory(request.prompt_len, reasoning.params)
        reasoning.num_given, reasoning.num_full = 0, request.prompt_len // self.cache.page_size
        reasoning.num_recomputed += bool(reasoning.substituted)
        reasoning.substituted = set()
        return True

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        prefills = work.prefills
        super().book(work, saved, seconds)
        for lease, history, matches in self.strategy.background.take():
            if lease.reasoning.history is history:
                for match in matches:
                    lease.consider(match)
        if not prefills:
            self._evaluate()
        return True

    def _evaluate(self) -> None:
        """Give the filter the new tokens, if they fill another page."""
        request = self.request
        reasoning, sequence = self.reasoning, request.sequence
        # `num_computed` may include drafted tokens that were rejected.
        ready = min(sequence.num_computed, len(sequence.tokens))
        if ready // self.cache.page_size == reasoning.num_full:
            return
        reasoning.num_full = ready // self.cache.page_size
        tokens = sequence.tokens[request.prompt_len + reasoning.num_given : ready]
        history, in_tree = reasoning.history, _in_tree(request)
        assert history is not None
        pages, first = in_tree + sequence.pages, len(in_tree)
        evaluate = self.strategy.filter.evaluate
        if self.strategy.background.offer(lambda: (self, history, evaluate(history, pages, first, tokens))):
            reasoning.num_given += len(tokens)
        else:
            self.strategy.counters["deferred_evaluations"] += 1

    def consider(self, match: PageMatch) -> None:
        """Apply a match if both pages are still in place and their distance is small enough."""
        # If a page was freed meanwhile, the measured rows may belong to another request.
        held = self._page(match.index), self._page(match.source_index)
        if held != (match.page, match.source_page) or not math.isfinite(match.distance):
            return
        most = self.strategy.reservoir.threshold(self.reasoning.params.percentile)
        self.strategy.reservoir.add(match.distance)
        if match.distance <= most:
            self.substitute(match.index, match.source_index)

    def _page(self, index: int) -> int:
        in_tree = _in_tree(self.request)
        return in_tree[index] if index < len(in_tree) else self.request.sequence.pages[index - len(in_tree)]

    def substitute(self, index: int, source_index: int) -> None:
        """Replace a page by an earlier page of the sequence, and free it. Pages with other readers stay.

        Args:
            index: index in the sequence of the page to replace: a full page of the output that the request owns.
            source_index: index of the earlier page, which may be in the tree.
        """
        request = self.request
        page_size, allocator = self.cache.page_size, self.cache.allocator
        reasoning, sequence = self.reasoning, request.sequence
        mine, at, page = sequence.pages, index - sequence.start // page_size, self._page(source_index)
        if mine[at] == page or allocator.refs[mine[at]] > 1:
            return
        allocator.retain([page])
        allocator.release([mine[at]])
        mine[at] = page
        reasoning.substituted.add(index)
        first = index * page_size - request.prompt_len
        before = reasoning.first_substituted
        reasoning.first_substituted = first if before is None else min(first, before)
        if reasoning.exact_tokens is None:
            reasoning.exact_tokens = len(sequence.tokens) - request.prompt_len
        self.strategy.num_saved += 1
        self.strategy.counters["substituted_pages"] += 1

    def _sure(self) -> int:
        """Number of tokens to commit. Output pages stay out of the tree while steps are compared with them."""
        computed: int = super()._sure()
        return computed if self.reasoning.history is None else min(computed, self.request.prompt_len)

    def release(self, keep: bool) -> None:
        reasoning = self.reasoning
        if reasoning.history is not None:
            reasoning.history = None
            self.strategy.num_saved -= len(reasoning.substituted)
            self._cut()
        super().release(keep)

    def _cut(self) -> None:
        """Release the pages from the first substituted page on, so that only exact pages are committed."""
        sequence, substituted = self.request.sequence, self.reasoning.substituted
        first = sequence.start // self.cache.page_size
        exact = min(substituted, default=first + len(sequence.pages)) - first
        self.cache.allocator.release(sequence.pages[exact:])
        sequence.pages = sequence.pages[:exact]
        sequence.num_computed = min(sequence.num_computed, (first + exact) * self.cache.page_size)

    def report(self) -> ReasoningReport | None:
        """Reported whenever the number of pages or of substituted pages has changed."""
        reasoning = self.reasoning
        substituted = 0 if reasoning.history is None else len(reasoning.substituted)
        pages = self.cache.pages_for(len(self.request.tokens))
        if (substituted, pages) == reasoning.reported:
            return None
        reasoning.reported = substituted, pages
        return ReasoningReport(
            approximate=reasoning.exact_tokens is not None,
            substituted_pages=substituted,
            amsr=round(substituted / pages, 4),
            first_substituted_token=reasoning.first_substituted,
            exact_tokens=reasoning.exact_tokens,
            recomputed=reasoning.num_recomputed,
        )


class ReasonCache(PrefixStrategy[ReasoningAsk]):
    """Replaces a page of a reasoning step by a similar page of an earlier step, and frees it.

    Each time a page is full, the new tokens go to a thread, which splits them into steps and measures the pages of
    closed steps. Matches are applied between two steps of the engine, if both pages are still at their indices. A step
    in flight may still read the freed page; this is safe, because only later steps overwrite it.

    The KV of a request is exact up to its first substituted page. Only whole pages before it are committed to the tree.
    A retracted request recomputes the rest exactly.

    Attributes:
        reservoir: distances of all requests.
        num_saved: number of pages that substitutions save now.
    """

    name = METHOD
    steady = False
    counted = ("substituted_pages", "deferred_evaluations")

    def __init__(self, cache: PagedCache, executor: Executor, load_tokenizer: Callable[[], Tokenizer]):
        super().__init__(cache, executor.spec.num_layers)
        self._has_all_heads = executor.spec.num_kv_heads == cache.pool.k.shape[2]
        self.filter = CollaborativeFilter(Distances(cache.pool), load_tokenizer, cache.page_size)
        self.background = Background[tuple[ReasoningLease, StepHistory, list[PageMatch]]]()
        self.reservoir = Reservoir()
        self.num_saved = 0

    def open(self, request: Request, ask: ReasoningAsk) -> ReasoningLease:
        if request.sampler.prompt_logprobs_from is not None:
            raise InvalidRequest("requests that share reasoning steps have no prompt log-probabilities", param="reuse")
        if not self._has_all_heads:
            raise InvalidRequest(f"method {self.name!r} is not served by several ranks", param="reuse.method")
        return ReasoningLease(self, request, ask)

    def figures(self) -> dict[str, float]:
        return {"saved_pages": self.num_saved, "reasoning_seconds": self.background.seconds}


def _in_tree(request: Request) -> array[int]:
    """The int32 ids of a request's leading pages, which are in the tree."""
    return request.segments[0].pages if request.segments else array("i")
