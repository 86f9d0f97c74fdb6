"""The `bicache` strategy of diffusion models: a shared prefix is encoded once and reused in the first layers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from radix import Match, Namespace, path
from runtime.batch import RowSet
from runtime.config import Config, DiffusionConfig
from runtime.kv.cache import PagedCache
from runtime.kv.segments import Run, Segment, slots_of
from runtime.models.spec import ModelSpec
from runtime.protocol import DiffusionInfo
from runtime.request import Found, Request, Strategy, Work
from runtime.reuse.bicache.depth_table import NO_TABLE, DepthTable, choose_table
from runtime.reuse.bicache.drift import Drift, num_near_layers
from runtime.reuse.bicache.encodings import BoundaryStore, Encodings, encoding_of
from runtime.reuse.bicache.measured import MeasuredDepths, ShallowMeta
from runtime.reuse.bicache.plan import Prefix, Share, Trial, next_work, plan_rows

# The paper's R.
_INTERVAL = 16
# Memory for cached boundary states of prefixes.
_BOUNDARY_BYTES = 1 << 28


class BiCache(Strategy):
    """A request finds or encodes its shared prefix and reads this encoding in the layers `[0, depth)`.

    The encoding is the request's only segment. The sequence has pages for every position of the canvas, because the
    other layers write KV of the prefix there. Guidance and measurements need a second canvas, with as many pages. A
    request gets all its pages when it is admitted.
    """

    name = "bicache"
    unchunkable = True
    counted = ("prefill_tokens", "encoded_prefixes", "refreshes", "divergences", "divergences_exceeded")

    def __init__(
        self, config: DiffusionConfig, table: DepthTable, spec: ModelSpec, cache: PagedCache, by_default: bool = True
    ):
        """`by_default`: whether requests without `reuse` share prefixes."""
        super().__init__(cache, spec.num_layers)
        self._by_default = by_default
        self.config, self.table, self.spec = config, table, spec
        self.encodings = Encodings(cache.tree)
        self.boundaries = BoundaryStore(_BOUNDARY_BYTES)

    @classmethod
    def load(cls, config: Config, directory: Path, spec: ModelSpec, cache: PagedCache) -> BiCache:
        """The strategy for a model, with its depth table. Raises ModelError if the table is invalid."""
        table = choose_table(config.diffusion.depth_table, directory, spec)
        return cls(config.diffusion, table, spec, cache, by_default=config.cache.reuse == "auto")

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
        """Denoising steps between refreshes; 1 without a table or a depth, which is exact with the default depth 1."""
        is_exact = self.table is NO_TABLE and depth is None
        return 1 if is_exact else self.table.interval or _INTERVAL

    def open(self, request: Request, ask: None) -> None:
        """A request without a canvas asks for no tokens: it only encodes its whole prompt."""
        if request.canvas is None:
            request.reuse = Share(declared=request.prompt_len, wanted_depth=1)
            return
        params = request.canvas.params
        bound = self.config.depth_bound if params.depth_bound is None else params.depth_bound
        default = 1 if bound == 0 else self._default_interval(params.depth)
        request.reuse = Share(
            reuse=self._by_default if params.reuse is None else params.reuse,
            declared=params.prefix_tokens,
            wanted_depth=params.depth,
            bound=bound,
            interval=params.refresh_interval or default,
            drift=Drift(params.drift_threshold) if params.refresh == "drift" else None,
        )

    def runs(self, tokens: array[int], namespace: Namespace, ask: None = None) -> list[Run]:
        return [Run(tokens, encoding_of(tokens.tobytes(), namespace))]

    def reads(self, request: Request) -> list[Run]:
        """The shared prefix; empty if the request shares none."""
        prefix: Prefix = self.find(request).detail
        if prefix.encoding is None or request.canvas is None:
            return []
        meta = ShallowMeta(prefix.length, self.table)
        return [Run(request.tokens[: prefix.length], prefix.encoding, meta=meta, whole=True)]

    def restored(self, tokens: array[int], namespace: Namespace) -> None:
        if self.encodings.match(tokens.tobytes(), namespace):
            self.encodings.add(tokens, namespace.without_entry, namespace)

    def meta_of(self, namespace: Namespace, described: dict[str, Any]) -> ShallowMeta | None:
        return ShallowMeta(described["encoded_tokens"], self.table) if namespace.entry.startswith("bicache:") else None

    # -- which prefix ----------------------------------------------------------------------------------------

    def find(self, request: Request) -> Found:
        """`Found.detail` is a `Prefix`.

        The shared pages never contain the row that predicts the first mask, because every step needs its logits.
        """
        share, measures = request.reuse, False
        length, unshared = self._shared_length(request)
        key, encoding, match = request.key(length), None, None
        if length:
            encoding = encoding_of(key, request.namespace)
            match = self.encodings.match(key, encoding) if request.canvas is not None else None
        meta = None if match is None or match.node is None else match.node.meta
        if not isinstance(meta, ShallowMeta):
            meta = ShallowMeta(length, self.table)
        depth = self._depth(request, length, meta)
        if length and not depth:
            encoding, match, unshared = None, None, "no_layer"
        if encoding is not None and share.wanted_depth is None and self._can_measure(request, length):
            measures = meta.measured.at(length / request.max_length).wants(share.bound, self.num_layers)
        found = Prefix(length, depth, encoding, unshared, meta, measures, match)
        return Found(0 if match is None else length, found)

    def _shared_length(self, request: Request) -> tuple[int, str | None]:
        """Tokens in whole pages of the declared prefix; without a declaration, of the longest encoded prefix.

        With 0 tokens comes the reason, see `Prefix.unshared`.
        """
        share, page_size = request.reuse, self.cache.page_size
        if not (share.reuse and self.cache.enabled):
            return 0, "off"
        limit = request.prompt_len
        if request.canvas is not None:
            limit -= request.canvas.spec.logits_shift
        if share.declared is None:
            length = self.encodings.discover(request.tokens, request.namespace, limit)
        else:
            length = min(share.declared, limit) // page_size * page_size
        if not length:
            return 0, "too_short" if share.declared else "no_prefix"
        if self.cache.pages_for(length) + self._num_private(request, False) > self.cache.pool.num_pages:
            return 0, "no_room"
        return length, None

    def _num_private(self, request: Request, measures: bool) -> int:
        """Number of pages for the canvas, twice as many with guidance or a measurement."""
        if request.canvas is None:
            return 0
        has_second = request.canvas.params.cfg_scale or measures
        return self.cache.pages_for(request.max_length) * (2 if has_second else 1)

    def _depth(self, request: Request, length: int, meta: ShallowMeta) -> int:
        share = request.reuse
        if not length:
            return 0
        depth: int | None = share.wanted_depth
        if depth is None:
            depth = meta.table.depth(length / request.max_length)
            if share.bound is not None:
                depth = meta.measured.at(length / request.max_length).choose(share.bound, depth)
        return min(depth, self.num_layers)

    def peer(self, request: Request, found: Found, computing: Sequence[Request]) -> tuple[Request, int] | None:
        """A running request that is encoding the same prefix."""
        encoding = found.detail.encoding
        for other in computing:
            if encoding is not None and other.reuse.is_encoding and other.reuse.encoding == encoding:
                return other, 0
        return None

    # -- running ---------------------------------------------------------------------------------------------

    def admit(self, request: Request, found: Found, headroom: int) -> bool:
        """Allocate all pages. Pages of a prefix that the request encodes stay its own until `book` inserts them."""
        cache, share, prefix = self.cache, request.reuse, found.detail
        match: Match | None = prefix.match
        node = None if match is None else cache.tree.lock_match(match)
        is_encoding = prefix.encoding is not None and match is None
        missing = cache.pages_for(prefix.length) if is_encoding else 0
        behind = array("i") if match is None else match.pages
        private = self._num_private(request, prefix.measures)
        fresh = cache.allocate(missing + private, behind, request.owner, cached=missing)
        if fresh is None:
            cache.tree.unlock(node)
            return False
        cache.use(node)
        share.take(prefix)
        pages = fresh[:missing] if is_encoding else behind
        request.read([Segment(pages, share.length, node=node)] if share.encoding else [])
        request.sequence.pages = fresh[missing:]
        request.cached_tokens = 0 if is_encoding else len(behind) * cache.page_size
        share.is_encoding = is_encoding
        share.boundary = self.boundaries.get((share.encoding, share.length, share.depth))
        if share.bound is not None and share.encoding is not None:
            self._measured(request).requests += 1
        return True

    def grow(self, request: Request, ahead: int = 0) -> bool:
        return True

    def work(self, request: Request, limit: int) -> Work:
        return next_work(request, self.num_layers, lambda: self._trial(request))

    def shrink(self, work: Work) -> bool:
        """False: rows with bidirectional attention cannot be split into several steps."""
        return False

    def rows(self, work: Work) -> list[RowSet]:
        return plan_rows(work, self.num_layers, self.cache.page_size)

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        request, share = work.request, work.request.reuse
        trial = work.detail.trial
        states, depth = (saved[0], share.depth) if trial is None else (saved[-1], trial.depth)
        if states is not None and self.boundaries.maxsize:
            # For other requests, and for this one's next refresh.
            if request.message.store:
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
        return True

    def _insert(self, request: Request, seconds: float) -> None:
        """Insert the encoded prefix into the tree, if the request allows it.

        Pages of this encoding that the tree has already are kept, because their KV is the same.
        """
        share, (segment,) = request.reuse, request.segments
        share.is_encoding = False
        if not request.message.store:
            return
        key = request.tokens[: share.length]
        node, segment.pages = self.cache.insert(
            key.tobytes(), segment.pages, share.encoding, seconds, share.meta, request.owner
        )
        self.cache.tree.lock(node)
        segment.node = node
        self.encodings.add(key, request.namespace, share.encoding)

    def release(self, request: Request, keep: bool) -> None:
        self.cache.release(request, request.message.hold_s)

    def distrust(self, request: Request) -> None:
        """Remove the encoding from the cache, unless it is pinned or another running request reads it."""
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
        measured = {
            "divergence_bound": share.bound,
            "refresh_interval": share.interval,
            "depth_divergence": share.divergence,
        }
        return {
            "shallow_depth": share.depth if share.encoding else 0,
            "encoded_tokens": share.length if share.encoding else 0,
            **({} if share.encoding else {"unshared": share.unshared}),
            "refreshes": share.refreshes,
            "prefix_ratio": round(share.length / request.max_length, 4),
            "denoise_steps": canvas.num_steps,
            **({} if share.bound is None else measured),
        }

    # -- measuring -------------------------------------------------------------------------------------------

    def _measured(self, request: Request) -> MeasuredDepths:
        found: MeasuredDepths = request.reuse.meta.measured.at(request.reuse.length / request.max_length)
        return found

    def _can_measure(self, request: Request, length: int) -> bool:
        """Whether a request has a bound, no guidance, and room in the pool for a second canvas."""
        share, canvas = request.reuse, request.canvas
        if not share.bound or canvas is None:
            return False
        room = self.cache.pages_for(length) + 2 * self.cache.pages_for(request.max_length)
        return not canvas.params.cfg_scale and room <= self.cache.pool.num_pages

    def _trial(self, request: Request) -> Trial | None:
        """The depth to measure at the first refresh, when all output is masked; None: nothing left to measure."""
        share = request.reuse
        start = self.table.depth(share.length / request.max_length)
        depth = self._measured(request).trial(share.bound, start, self.num_layers)
        if depth <= 1:
            return None
        boundary = self.boundaries.get((share.encoding, share.length, depth))
        return Trial(depth, boundary, lambda nats: self._note(request, depth, nats))

    def _note(self, request: Request, depth: int, nats: float) -> None:
        """Record a divergence and choose the request's depth anew; this step computed the prefix in all layers."""
        share, measured = request.reuse, self._measured(request)
        measured.note(depth, nats)
        fresh, cached = (
            slots_of(pages, np.arange(share.length), self.cache.page_size)
            for pages in (request.sequence.pages, request.segments[0].pages)
        )
        measured.reach = num_near_layers(self.cache.pool, fresh, cached)
        if depth == share.depth:
            share.divergence = nats
            self.counters["divergences"] += 1
            self.counters["divergences_exceeded"] += nats > share.bound
        chosen = measured.choose(share.bound, depth)
        if chosen != share.depth:
            share.depth, share.boundary = chosen, self.boundaries.get((share.encoding, share.length, chosen))

    def _note_drift(self, work: Work) -> None:
        request, share = work.request, work.request.reuse
        rows = np.arange(share.length, request.prompt_len)
        slots = slots_of(request.sequence.pages, rows, self.cache.page_size)
        share.drift.note(self.cache.pool, slots, range(share.depth, self.num_layers), work.detail.refresh)
