"""The `bicache` strategy of diffusion models: settles which prefix a request shares, encodes it once, and keeps it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from radix import Namespace, path
from runtime.config import DiffusionConfig
from runtime.diffusion.canvas import Canvas
from runtime.kv.cache import PagedCache
from runtime.models.spec import ModelSpec
from runtime.protocol import DiffusionInfo
from runtime.request import Request, Run, Segment, Work
from runtime.reuse.bicache.boundary_states import BoundaryStore
from runtime.reuse.bicache.depth_table import NO_TABLE, DepthTable, choose_table
from runtime.reuse.bicache.drift import Drift, num_near_layers
from runtime.reuse.bicache.encodings import Beginning, Encodings, encoding_of
from runtime.reuse.bicache.measured import Ledger
from runtime.reuse.bicache.plan import Share, Trial, next_work, plan_rows, slots_of
from runtime.reuse.bicache.shallow_meta import ShallowMeta, meet_all
from runtime.reuse.build import RowSet
from runtime.reuse.strategy import Found, Strategy

# The paper's R.
_INTERVAL = 16


class BiCache(Strategy):
    """Requests encode their shared prefix, or find it encoded, and read it in shallow layers.

    The encoding is the request's one segment, valid in layers `[0, depth)`. The sequence has pages for every position
    of the canvas: the KV of prefix rows in the layers that are not reused lies there. With guidance it has as many
    again, for the canvas without its prompt. A request gets all its pages when it is admitted.
    """

    name = "bicache"
    takes_turns = True
    counted = ("encoded_prefixes", "partial_matches", "refreshes", "divergences", "divergences_exceeded")

    def __init__(self, config: DiffusionConfig, table: DepthTable, spec: ModelSpec, cache: PagedCache):
        super().__init__(cache, spec.num_layers)
        self.config, self.table, self.spec = config, table, spec
        self.encodings = Encodings(cache.tree)
        self.boundaries = BoundaryStore(int(config.boundary_memory * 2**30))

    @classmethod
    def load(cls, config: DiffusionConfig, directory: Path, spec: ModelSpec, cache: PagedCache) -> BiCache:
        """The strategy for a model, with its depth table. Raises ModelError if the table cannot be used."""
        return cls(config, choose_table(config.depth_table, directory, spec), spec, cache)

    @property
    def info(self) -> DiffusionInfo:
        """The model and its table, for the front end."""
        assert self.spec.diffusion is not None
        return DiffusionInfo(
            self.spec.diffusion.mask_token_id,
            self.spec.diffusion.algorithm,
            self.spec.num_layers,
            self.table.version,
            self._default_interval(None),
            depth_bound=self.config.depth_bound,
        )

    def _default_interval(self, depth: int | None) -> int:
        """Without a table nothing is known that approximation could rest on: depth 1, always refreshed, is exact."""
        is_exact = self.table is NO_TABLE and depth is None
        return self.config.refresh_interval or (1 if is_exact else self.table.interval or _INTERVAL)

    def open(self, request: Request, asked: dict[str, Any]) -> None:
        """A request without a canvas encodes its whole prompt, whether it is encoded already or not."""
        if request.canvas is None:
            request.reuse = Share(declared=request.prompt_len, wanted_depth=1)
            return
        params = request.canvas.params
        declared = params.prefix_tokens
        request.reuse = Share(
            reuse=self.config.bicache if params.reuse is None else params.reuse,
            # A declared prefix is meant to be encoded.
            partial=self.config.partial_matches and declared is None if params.partial is None else params.partial,
            declared=declared,
            wanted_depth=params.depth,
            wanted_interval=params.refresh_interval,
            bound=self.config.depth_bound if params.depth_bound is None else params.depth_bound,
            interval=params.refresh_interval or self._default_interval(params.depth),
            drift=Drift(params.drift_threshold) if params.refresh == "drift" else None,
        )

    def runs(self, tokens: array[int], namespace: Namespace, asked: dict[str, Any]) -> list[Run]:
        return [Run(tokens, encoding_of(tokens.tobytes(), namespace))]

    def reads(self, request: Request) -> list[Run]:
        """The prefix that it shares, if it is known which one that is."""
        self.find(request)
        share = request.reuse
        if share.encoding is None or share.is_partial or request.canvas is None:
            return []
        meta = ShallowMeta(share.length, self.table)
        return [Run(request.tokens[: share.length], share.encoding, meta=meta, whole=True)]

    def restored(self, tokens: array[int], namespace: Namespace) -> None:
        if self.encodings.match(tokens.tobytes(), namespace):
            self.encodings.add(tokens, namespace.without_entry, namespace)

    def meta_of(self, namespace: Namespace, described: dict[str, Any]) -> ShallowMeta | None:
        return ShallowMeta(described["encoded_tokens"], self.table) if namespace.entry.startswith("bicache:") else None

    # -- which prefix ----------------------------------------------------------------------------------------

    def find(self, request: Request) -> Found:
        """Settles the request's `Share`.

        Whole pages are shared. The row that the first mask is read from is never part of them: the head runs on rows
        that are computed at every step.
        """
        share = request.reuse
        found = self._whole(request)
        found = self._beginning(request, found) or found
        share.measures_depth = share.measures_interval = False
        share.unshared = self._without_prefix(share) if not found.length else None
        private = self._num_private(request)
        if self.cache.pages_for(found.length) + private > self.cache.pool.num_pages:
            found, share.unshared = Beginning(None, 0, 0), "no_room"
        share.length, share.encoded = found.length, found.encoded
        match = None
        if found.encoding is not None and request.canvas is not None:
            match = self.encodings.match(request.key(found.length), found.encoding)
            found = replace(found, meta=None if match is None else meet_all(match.node))
        share.depth = self._depth(request, found)
        share.encoding = found.encoding if share.depth else None
        if found.length and not share.depth:
            share.unshared = "no_layer"
        share.meta = found.meta or ShallowMeta(found.encoded, self.table)
        if self._can_measure(request):
            self._choose_measures(request)
        return Found(share.length, match) if match is not None and share.depth else Found()

    def _without_prefix(self, share: Share) -> str:
        if not (share.reuse and self.cache.enabled):
            return "off"
        return "too_short" if share.declared else "no_prefix"

    def _num_private(self, request: Request) -> int:
        """Pages for the canvas, and with guidance or for measurements for a second one."""
        if request.canvas is None:
            return 0
        has_second = request.canvas.params.cfg_scale or request.reuse.measures
        return self.cache.pages_for(request.max_tokens) * (2 if has_second else 1)

    def _depth(self, request: Request, found: Beginning) -> int:
        if not found.length:
            return 0
        depth = request.reuse.wanted_depth
        if depth is None:
            meta = found.meta or ShallowMeta(found.encoded, self.table)
            depth = meta.depth(found.length, found.length / request.max_tokens)
            bound = request.reuse.bound
            if bound is not None and (found.length == found.encoded or bound == 0):
                depth = meta.measured.at(found.length / request.max_tokens).depth.choose(bound, depth)
        return min(depth, self.num_layers)

    def _limit(self, request: Request) -> int:
        """Leading tokens that may be shared."""
        if request.canvas is None:
            return request.prompt_len
        return request.prompt_len - request.canvas.spec.logits_shift

    def _whole(self, request: Request) -> Beginning:
        """All of a prefix: the declared one, encoded or not, or one that is found to be encoded."""
        share, page_size = request.reuse, self.cache.page_size
        if not (share.reuse and self.cache.enabled):
            return Beginning(None, 0, 0)
        limit = self._limit(request)
        if share.declared is None:
            length = self.encodings.discover(request.tokens, request.namespace, limit)
        else:
            length = min(share.declared, limit) // page_size * page_size
        return Beginning(encoding_of(request.key(length), request.namespace) if length else None, length, length)

    def _beginning(self, request: Request, whole: Beginning) -> Beginning | None:
        """The beginning of another encoding, where that is wanted and goes further than what is cached as a whole.

        None where the table was not measured for that.
        """
        share = request.reuse
        if not (share.reuse and share.partial and self.cache.enabled):
            return None
        limit = self._limit(request)
        has_whole = whole.encoding is not None and self.encodings.match(request.key(whole.length), whole.encoding)
        if share.declared is not None:
            if has_whole:
                return None
            limit = min(limit, share.declared)
        found = self.encodings.beginning(request.tokens, request.namespace, limit)
        if found is None or (has_whole and found.length <= whole.length):
            return None
        return found if self._depth(request, found) else None

    def peer(self, request: Request, found: Found, computing: Sequence[Request]) -> tuple[Request, int] | None:
        """One that encodes the same prefix."""
        encoding = request.reuse.encoding
        for other in computing:
            if encoding is not None and other.reuse.is_encoding and other.reuse.encoding == encoding:
                return other, 0
        return None

    # -- running ---------------------------------------------------------------------------------------------

    def admit(self, request: Request, found: Found, headroom: int) -> bool:
        """While the prefix is encoded, its pages are still the request's own."""
        cache, share, match = self.cache, request.reuse, found.detail
        node = None if match is None else cache.tree.lock_match(match)
        is_encoding = share.encoding is not None and match is None
        missing = cache.pages_for(share.length) if is_encoding else 0
        behind = array("i") if match is None else match.pages
        private = self._num_private(request)
        fresh = cache.allocate(missing + private, behind, request.owner, cached=missing)
        if fresh is None:
            cache.tree.unlock(node)
            return False
        cache.use(node)
        pages = fresh[:missing] if is_encoding else behind
        layers = range(share.depth)
        request.segments = [Segment(pages, share.length, layers=layers, node=node)] if share.encoding else []
        request.sequence.pages = fresh[missing:]
        request.cached_tokens = 0 if is_encoding else len(behind) * cache.page_size
        share.is_encoding = is_encoding
        share.boundary = self.boundaries.get(share.encoding, share.length, share.depth)
        if self._follows(share):
            share.interval = self._ledger(request).interval.choose(share.bound, share.interval)
        if share.bound is not None and share.encoding is not None:
            self._ledger(request).requests += 1
        return True

    def grow(self, request: Request, ahead: int = 0) -> bool:
        return True

    def work(self, request: Request, limit: int) -> Work:
        return next_work(request, self.num_layers, lambda: self._trial(request))

    def shrink(self, work: Work) -> bool:
        """Rows that see each other cannot be cut."""
        return False

    def rows(self, work: Work) -> list[RowSet]:
        return plan_rows(work, self.num_layers, self.cache.page_size)

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        request, share = work.request, work.request.reuse
        # A row set with which another is compared may have another depth; the other saves nothing then.
        trial = work.detail.trial
        states, depth = (saved[0], share.depth) if trial is None or trial.age else (saved[-1], trial.depth)
        if states is not None and self.boundaries.max_bytes:
            # For other requests, and for this one's next refresh.
            if request.store:
                self.boundaries.put(share.encoding, depth, states)
            if depth == share.depth:
                share.boundary = states
        if share.is_encoding:
            self._insert(request, seconds)
            self.counters["encoded_prefixes"] += 1
            self.counters["prefill_tokens"] += work.num_rows
            return not request.wants_tokens
        if trial is not None:
            pages, half = request.sequence.pages, len(request.sequence.pages) // 2
            request.sequence.pages = pages[half:] + pages[:half]
        if share.drift is not None and work.start <= share.length:
            self._note_drift(work)
        if work.detail.refresh or trial is not None:
            share.refreshed_at = request.canvas.num_steps
            share.refreshes += 1
            self.counters["refreshes"] += 1
        self.counters["partial_matches"] += share.is_partial and not request.canvas.num_steps
        return True

    def _insert(self, request: Request, seconds: float) -> None:
        """Hand the prefix that a request has encoded to the tree, if it may be kept.

        Where the tree still had some pages of this encoding, they stay: their KV is the same.
        """
        share, (segment,) = request.reuse, request.segments
        share.is_encoding = False
        if not request.store:
            return
        key = request.tokens[: share.length]
        node, segment.pages = self.cache.insert(
            key.tobytes(), segment.pages, share.encoding, seconds, share.meta, request.owner
        )
        self.cache.tree.lock(node)
        segment.node = node
        self.encodings.add(key, request.namespace, share.encoding)

    def release(self, request: Request, keep: bool) -> None:
        self.cache.release(request)

    def distrust(self, request: Request) -> None:
        """The encoding goes, unless it is pinned or another live request reads it."""
        self.cache.release(request)
        encoding = request.reuse.encoding
        if encoding is None:
            return
        found = self.cache.tree.match(request.key(request.reuse.length), encoding)
        for top in list(path(found.node))[-1:]:
            self.cache.distrust(top)
        self.boundaries.discard(encoding)

    def flush(self) -> None:
        self.boundaries.clear()

    def phase(self, request: Request) -> str:
        return "encode" if request.reuse.is_encoding else "denoise"

    def report(self, request: Request) -> dict[str, Any] | None:
        share, canvas = request.reuse, request.canvas
        if canvas is None:
            return None
        return {
            "shallow_depth": share.depth if share.encoding else 0,
            "encoded_tokens": share.encoded if share.encoding else 0,
            **({} if share.encoding else {"unshared": share.unshared}),
            "refreshes": share.refreshes,
            "prefix_ratio": round(share.length / request.max_tokens, 4),
            "denoise_steps": canvas.num_steps,
            **({} if share.bound is None else self._report_measured(share)),
        }

    # -- measuring -------------------------------------------------------------------------------------------

    def _ledger(self, request: Request) -> Ledger:
        share = request.reuse
        return share.meta.measured.at(share.length / request.max_tokens)

    @staticmethod
    def _follows(share: Share) -> bool:
        """Whether the interval is the measured one."""
        is_free = share.wanted_interval is None and share.drift is None
        return share.bound is not None and is_free and (not share.is_partial or share.bound == 0)

    def _learns_interval(self, request: Request) -> bool:
        """With a Fast-dLLM cache there are few steps, and refreshes at a block's beginning alone."""
        return self._follows(request.reuse) and request.canvas.params.cache == "none"

    def _can_measure(self, request: Request) -> bool:
        """Whether a request shares a whole encoding under a bound, and there is room for a second canvas."""
        share, canvas = request.reuse, request.canvas
        if not share.bound or share.encoding is None or canvas is None or share.is_partial:
            return False
        room = self.cache.pages_for(share.length) + 2 * self.cache.pages_for(request.max_tokens)
        return not canvas.params.cfg_scale and room <= self.cache.pool.num_pages

    def _choose_measures(self, request: Request) -> None:
        """Measure what there is to learn."""
        share, ledger = request.reuse, self._ledger(request)
        if share.wanted_depth is None:
            share.measures_depth = ledger.wants(ledger.depth, share.bound, self.num_layers)
        if self._learns_interval(request) and share.depth < self.num_layers:
            share.measures_interval = ledger.wants(ledger.interval, share.bound, _most_interval(request.canvas))

    def _trial(self, request: Request) -> Trial | None:
        """The trial of the next refresh: at the first, while all is masked, a depth, later the age of the prefix."""
        share, ledger = request.reuse, self._ledger(request)
        if share.measures_depth and share.refreshed_at < 0:
            start = self.table.depth(share.length / request.max_tokens)
            depth = ledger.depth.trial(share.bound, start, self.num_layers)
            if depth > 1:
                boundary = self.boundaries.get(share.encoding, share.length, depth)
                return Trial(depth, 0, boundary, lambda nats: self._note_depth(request, depth, nats))
        age = request.canvas.num_steps - share.refreshed_at
        if share.refreshed_at < 0 or age < 2 or share.depth == self.num_layers or not share.measures_interval:
            return None
        return Trial(share.depth, age, share.boundary, lambda nats: self._note_interval(request, age, nats))

    def _note_depth(self, request: Request, depth: int, nats: float) -> None:
        """The request goes on with the depth that follows; it has just computed the prefix in all layers."""
        share, ladder = request.reuse, self._ledger(request).depth
        ladder.note(depth, nats)
        fresh, cached = (
            slots_of(np.frombuffer(pages, dtype=np.int32), np.arange(share.length), self.cache.page_size)
            for pages in (request.sequence.pages, request.segments[0].pages)
        )
        ladder.reach = num_near_layers(self.cache.pool, fresh, cached)
        if depth == share.depth:
            self._count(share, "depth", nats)
        chosen = ladder.choose(share.bound, depth)
        if chosen != share.depth:
            share.depth, share.boundary = chosen, self.boundaries.get(share.encoding, share.length, chosen)
            request.segments[0].layers = range(chosen)

    def _note_interval(self, request: Request, age: int, nats: float) -> None:
        share, ladder = request.reuse, self._ledger(request).interval
        ladder.note(age, nats)
        self._count(share, "refresh", nats)
        share.interval = ladder.trial(share.bound, age, _most_interval(request.canvas))

    def _count(self, share: Share, what: str, nats: float) -> None:
        assert share.bound is not None
        share.divergences[what] = max(nats, share.divergences.get(what, 0.0))
        self.counters["divergences"] += 1
        self.counters["divergences_exceeded"] += nats > share.bound

    def _note_drift(self, work: Work) -> None:
        request, share = work.request, work.request.reuse
        rows = np.arange(share.length, request.prompt_len)
        pages = np.frombuffer(request.sequence.pages, dtype=np.int32)
        slots, layers = slots_of(pages, rows, self.cache.page_size), range(share.depth, self.num_layers)
        share.drift.note(self.cache.pool, slots, layers, work.detail.refresh)

    @staticmethod
    def _report_measured(share: Share) -> dict[str, Any]:
        measured = {f"{what}_divergence": share.divergences.get(what) for what in ("depth", "refresh")}
        return {"divergence_bound": share.bound, "refresh_interval": share.interval, **measured}


def _most_interval(canvas: Canvas) -> int:
    """The longest interval that a request measures: it ends with a refresh in the second half of the steps."""
    return max((canvas.params.steps or 1) // 2, 1)
