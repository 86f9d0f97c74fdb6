"""The `reasoncache` strategy: prefix caching, and pages of reasoning steps that repeat are shared (ReasonCache)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from radix import Namespace
from runtime.errors import InvalidRequest
from runtime.execution.executor import Executor
from runtime.kv.cache import PagedCache
from runtime.models.tokenizer import Tokenizer
from runtime.params import ReasoningParams
from runtime.request import Request, Work
from runtime.reuse.build import Read, Stage
from runtime.reuse.prefix import PrefixStrategy
from runtime.reuse.reasoning.background import Background
from runtime.reuse.reasoning.distance import Distances
from runtime.reuse.reasoning.evaluation import Evaluation, Life, Match, Table, Thoughts
from runtime.reuse.reasoning.reservoir import Reservoir
from runtime.reuse.strategy import Found


@dataclass(slots=True, eq=False, kw_only=True)
class Reasoning(Thoughts):
    """A request whose reasoning steps are compared.

    Attributes:
        request: itself.
        life: while it is admitted.
        num_full: full pages when it was last given some.
        given: tokens of the output that the evaluation was given in this life.
        first_substituted: the token of the output with which the first page begins that was ever substituted.
        exact_tokens: tokens of the output that were chosen before; both are None where no page was.
        num_recomputed: admissions that computed again, exactly, what had been substituted before.
        is_lost: whether the next admission will.
        reported: substituted pages and all pages, as last reported.
    """

    request: Request
    life: Life | None = None
    num_full: int = 0
    given: int = 0
    first_substituted: int | None = None
    exact_tokens: int | None = None
    num_recomputed: int = 0
    is_lost: bool = False
    reported: tuple[int, int] = (-1, -1)


class ReasonCache(PrefixStrategy):
    """Pages of a reasoning step are replaced by those of an earlier step that is like it, and freed.

    Each time a page is full, the new tokens are handed to a thread, which splits them into steps and measures the
    pages of steps that are closed. Its matches are applied between two steps of the engine, if both pages are still
    where they were found: a page is then freed while a step in flight may read it, and whoever gets it writes later.

    A request is exact up to its first substituted page, and only that is committed under its tokens. When it gives
    way, all of it is computed again.

    Attributes:
        reservoirs: distances by rotation, of all requests.
        num_saved: pages that substitutions save now.
    """

    name = "reasoncache"
    steady = False
    counted = ("substituted_pages", "phase_misses", "deferred_evaluations")

    def __init__(self, cache: PagedCache, executor: Executor, load_tokenizer: Callable[[], Tokenizer]):
        super().__init__(cache, executor.spec.num_layers)
        self._has_all_heads = executor.spec.num_kv_heads == cache.pool.k.shape[2]
        self._evaluation = Evaluation(Distances(cache.pool, executor.rope), load_tokenizer, cache.page_size)
        self.background = Background()
        self.reservoirs = {"stale": Reservoir(), "moved": Reservoir()}
        self.num_saved = 0
        self._across: dict[Reasoning, Namespace] = {}

    def open(self, request: Request, asked: dict[str, Any]) -> None:
        """`random_share` of `asked`, for measurements: the share of pages that are replaced by random earlier ones."""
        if request.prompt_logprobs_from is not None:
            raise InvalidRequest("requests that share reasoning steps have no prompt log-probabilities", param="reuse")
        if not self._has_all_heads:
            raise InvalidRequest(f"method {self.name!r} is not served by several ranks", param="reuse.method")
        fields = {name: value for name, value in asked.items() if name in ReasoningParams.model_fields}
        share = float(asked.get("random_share", 0.0))
        params = ReasoningParams.model_validate(fields)
        request.reuse = Reasoning(request.prompt_len, params, share, request=request)

    def admit(self, request: Request, found: Found, headroom: int) -> bool:
        if not super().admit(request, found, headroom):
            return False
        reasoning: Reasoning = request.reuse
        reasoning.life = Life()
        reasoning.given, reasoning.num_full = 0, request.prompt_len // self.cache.page_size
        reasoning.num_recomputed += reasoning.is_lost
        reasoning.is_lost = False
        if reasoning.params.across and request.store:
            self._across[reasoning] = request.namespace
        return True

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        prefills = work.prefills
        super().book(work, saved, seconds)
        for matches in self.background.take():
            for match in matches:
                self._consider(match)
        if not prefills:
            self._evaluate(work.request)
        return True

    def _evaluate(self, request: Request) -> None:
        """Let the thread look at the tokens since the last time, if they fill another page."""
        reasoning, sequence = request.reuse, request.sequence
        # Tokens of a draft are computed before they are known to be right.
        ready = min(sequence.num_computed, len(sequence.tokens))
        if ready // self.cache.page_size == reasoning.num_full:
            return
        reasoning.num_full = ready // self.cache.page_size
        tokens = sequence.tokens[reasoning.prompt_len + reasoning.given : ready]
        life = reasoning.life
        pages = _in_tree(request) + sequence.pages
        table = Table(life, len(pages) - len(sequence.pages), pages, dict(life.shifts))
        others = [other for other in self._across if self._may_share(reasoning, other)]
        if self.background.offer(partial(self._evaluation.evaluate, reasoning, table, tokens, others)):
            reasoning.given += len(tokens)
        else:
            self.counters["deferred_evaluations"] += 1

    def _may_share(self, reasoning: Reasoning, other: Reasoning) -> bool:
        if reasoning is other or reasoning not in self._across or other.table is None:
            return False
        is_alike = reasoning.params.rotation == other.params.rotation
        return is_alike and self._across[reasoning] == self._across[other]

    # -- sharing ---------------------------------------------------------------------------------------------

    def _consider(self, match: Match) -> None:
        """Share a page, if it is close enough."""
        taker, source = match.taker, match.source
        assert isinstance(taker, Reasoning)
        assert isinstance(source, Reasoning)
        # Pages that were freed meanwhile may have been measured with what others wrote there.
        if not self._holds(taker, match.life, match.place, match.page):
            return
        if not self._holds(source, match.source_life, match.source_place, match.source_page):
            return
        if match.distance is not None:
            if not math.isfinite(match.distance):
                return
            reservoir = self.reservoirs[taker.params.rotation]
            most = reservoir.threshold(taker.params.percentile)
            reservoir.add(match.distance)
            if match.distance > most:
                self.counters["phase_misses"] += not match.in_phase
                return
        self.substitute(taker, match.place, source, match.source_place)

    def _holds(self, reasoning: Reasoning, life: Life, place: int, page: int) -> bool:
        return reasoning.life is life and self._page(reasoning, place) == page

    def _page(self, reasoning: Reasoning, place: int) -> int:
        before = _in_tree(reasoning.request)
        return before[place] if place < len(before) else reasoning.request.sequence.pages[place - len(before)]

    def substitute(self, taker: Reasoning, place: int, source: Reasoning, source_place: int) -> None:
        """Read another page in place of one, which is freed, unless it is shared itself.

        Args:
            taker, place: a request, and the place in its sequence of a whole page of its output that it owns.
            source, source_place: likewise; of the same request, an earlier one, which the tree may own.
        """
        page_size, allocator = self.cache.page_size, self.cache.allocator
        assert taker.life is not None
        assert source.life is not None
        sequence = taker.request.sequence
        mine, at, page = sequence.pages, place - sequence.start // page_size, self._page(source, source_place)
        if mine[at] == page or allocator.refs[mine[at]] > 1:
            return
        allocator.retain([page])
        allocator.release([mine[at]])
        mine[at] = page
        shift = (place - source_place) * page_size + source.life.shifts.get(source_place, 0)
        taker.life.shifts[place] = shift if taker.params.rotation == "moved" else 0
        first = place * page_size - taker.prompt_len
        taker.first_substituted = first if taker.first_substituted is None else min(first, taker.first_substituted)
        if taker.exact_tokens is None:
            taker.exact_tokens = len(sequence.tokens) - taker.prompt_len
        self.num_saved += 1
        self.counters["substituted_pages"] += 1

    def _stages(self, request: Request, first: int, stop: int) -> list[Stage]:
        """Pages that were computed for other positions are read with their shifts."""
        (stage,) = super()._stages(request, first, stop)
        moved = {place: shift for place, shift in request.reuse.life.shifts.items() if shift}
        if not moved:
            return [stage]
        (read,) = stage.reads
        shifts = np.zeros(len(read.pages), dtype=np.int64)
        shifts[list(moved)] = list(moved.values())
        hidden = len(moved) * self.cache.page_size
        visible = None if read.visible is None else read.visible - np.int32(hidden)
        stage.reads = [Read(read.pages[shifts == 0], read.length - hidden, visible=visible)]
        for shift in dict.fromkeys(moved.values()):
            pages = read.pages[shifts == shift]
            stage.reads.append(Read(pages, len(pages) * self.cache.page_size, shift))
        return [stage]

    # -- the end ---------------------------------------------------------------------------------------------

    def _sure(self, request: Request) -> int:
        """Pages of the output stay the request's own as long as it lives: its steps are compared."""
        computed: int = super()._sure(request)
        return computed if request.reuse.life is None else min(computed, request.prompt_len)

    def release(self, request: Request, keep: bool) -> None:
        reasoning: Reasoning = request.reuse
        life, reasoning.life = reasoning.life, None
        self._across.pop(reasoning, None)
        if life is not None:
            self.num_saved -= len(life.shifts)
            reasoning.is_lost = bool(life.shifts)
            self._cut(request, life)
        super().release(request, keep)

    def _cut(self, request: Request, life: Life) -> None:
        """Leave what may be committed: pages before all substituted ones, up to one that others share."""
        sequence, allocator = request.sequence, self.cache.allocator
        first = sequence.start // self.cache.page_size
        exact = min(life.shifts, default=first + len(sequence.pages)) - first
        allocator.release(sequence.pages[exact:])
        shared = np.flatnonzero(allocator.refs[sequence.pages[:exact]] > 1)
        alone = int(shared[0]) if len(shared) else exact
        allocator.release(sequence.pages[alone:exact])
        sequence.pages = sequence.pages[:alone]
        sequence.num_computed = min(sequence.num_computed, (first + alone) * self.cache.page_size)

    def report(self, request: Request) -> dict[str, Any] | None:
        """Whenever another page is full or substituted."""
        reasoning: Reasoning = request.reuse
        substituted = len(reasoning.life.shifts) if reasoning.life is not None else 0
        pages = self.cache.pages_for(len(request.tokens))
        if (substituted, pages) == reasoning.reported:
            return None
        reasoning.reported = substituted, pages
        return {
            "strategy": self.name,
            "method": self.name,
            "rotation": reasoning.params.rotation,
            "approximate": reasoning.exact_tokens is not None,
            "substituted_pages": substituted,
            "amsr": round(substituted / pages, 4),
            "first_substituted_token": reasoning.first_substituted,
            "exact_tokens": reasoning.exact_tokens,
            "recomputed": reasoning.num_recomputed,
        }

    def figures(self) -> dict[str, float]:
        return {"saved_pages": self.num_saved, "reasoning_seconds": self.background.seconds}


def _in_tree(request: Request) -> array[int]:
    """Pages of the tree that a request reads, which are its first ones."""
    return request.segments[0].pages if request.segments else array("i")
