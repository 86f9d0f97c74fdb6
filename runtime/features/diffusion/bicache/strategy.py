"""The `bicache` strategy of diffusion models: a shared prefix is encoded once and reused in the first layers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch
from msgspec import UNSET

from radix import Match, Namespace, path
from runtime.batch import RowSet
from runtime.config import DiffusionConfig
from runtime.features.diffusion.ask import DiffusionInfo, SharedPrefixReport, Unshared
from runtime.features.diffusion.bicache.depth_table import NO_TABLE, DepthTable, choose_table
from runtime.features.diffusion.bicache.drift import Drift, num_near_layers
from runtime.features.diffusion.bicache.encodings import BoundaryStore, Encodings, encoding_of
from runtime.features.diffusion.bicache.measured import MeasuredDepths, ShallowMeta
from runtime.features.diffusion.bicache.plan import (
    DenoiseWork,
    Prefix,
    Share,
    Trial,
    bidirectional,
    next_work,
    plan_rows,
)
from runtime.features.diffusion.canvas import BidirectionalCanvas
from runtime.features.diffusion.published import DiffusionSpec
from runtime.features.feature import Opening
from runtime.kv.cache import PagedCache
from runtime.kv.segments import Run, Segment, slots_of
from runtime.request import Found, Lease, Request, Strategy, Work

# The paper's R.
_INTERVAL = 16
# Memory for cached boundary states of prefixes.
_BOUNDARY_BYTES = 1 << 28


class BiCacheLease(Lease):
    """A request finds or encodes its shared prefix and reads this encoding in the layers `[0, depth)`.

    The encoding is the request's only segment. The sequence has pages for every position of the canvas, because the
    other layers write KV of the prefix there. Guidance and measurements need a second canvas, with as many pages. A
    request gets all its pages when it is admitted.
    """

    strategy: BiCache

    def __init__(self, strategy: BiCache, request: Request, share: Share):
        super().__init__(strategy, request)
        self.share = share

    @property
    def canvas(self) -> BidirectionalCanvas | None:
        """The request's canvas; None: it only encodes its prompt."""
        return None if self.request.decoding_state is None else bidirectional(self.request)

    def reads(self) -> list[Run]:
        """The shared prefix; empty if the request shares none."""
        prefix = self.look()
        if prefix.encoding is None or self.canvas is None:
            return []
        meta = ShallowMeta(prefix.length, self.strategy.table)
        return [Run(self.request.tokens[: prefix.length], prefix.encoding, meta=meta, whole=True)]

    # -- which prefix ----------------------------------------------------------------------------------------

    def look(self) -> Prefix:
        """The shared pages never contain the row that predicts the first mask: every step needs its logits."""
        request = self.request
        share, measures = self.share, False
        length, unshared = self._shared_length()
        key, encoding, match = request.key(length), None, None
        if length:
            encoding = encoding_of(key, request.namespace)
            match = self.strategy.encodings.match(key, encoding) if self.canvas is not None else None
        meta = None if match is None or match.node is None else match.node.meta
        if not isinstance(meta, ShallowMeta):
            meta = ShallowMeta(length, self.strategy.table)
        depth = self._depth(length, meta)
        if length and not depth:
            encoding, match, unshared = None, None, "no_layer"
        if encoding is not None and share.bound and share.wanted_depth is None and self._has_room(length):
            measures = meta.measured.at(length / request.max_length).wants(share.bound, self.strategy.num_layers)
        is_there = match is not None
        return Prefix(length if is_there else 0, match or Match(), length, depth, encoding, unshared, meta, measures)

    def _shared_length(self) -> tuple[int, Unshared | None]:
        """Tokens in whole pages of the declared prefix; without a declaration, of the longest encoded prefix.

        With 0 tokens comes the reason, see `Prefix.unshared`.
        """
        request = self.request
        share, page_size = self.share, self.cache.page_size
        if not (share.reuse and self.cache.enabled):
            return 0, "off"
        limit = request.prompt_len
        if self.canvas is not None:
            limit -= self.canvas.spec.logits_shift
        if share.declared is None:
            length = self.strategy.encodings.discover(request.tokens, request.namespace, limit)
        else:
            length = min(share.declared, limit) // page_size * page_size
        if not length:
            return 0, "too_short" if share.declared else "no_prefix"
        if self.cache.pages_for(length) + self._num_private(False) > self.cache.pool.num_pages:
            return 0, "no_room"
        return length, None

    def _num_private(self, measures: bool) -> int:
        """Number of pages for the canvas, twice as many with guidance or a measurement."""
        request = self.request
        if self.canvas is None:
            return 0
        has_second = self.canvas.params.cfg_scale or measures
        return self.cache.pages_for(request.max_length) * (2 if has_second else 1)

    def _depth(self, length: int, meta: ShallowMeta) -> int:
        request = self.request
        share = self.share
        if not length:
            return 0
        depth: int | None = share.wanted_depth
        if depth is None:
            depth = meta.table.depth(length / request.max_length)
            if share.bound is not None:
                depth = meta.measured.at(length / request.max_length).choose(share.bound, depth)
        return min(depth, self.strategy.num_layers)

    def peer(self, found: Found, computing: Sequence[Lease]) -> tuple[Request, int] | None:
        """A running request that is encoding the same prefix."""
        assert isinstance(found, Prefix)
        for other in computing:
            assert isinstance(other, BiCacheLease)
            if found.encoding is not None and other.share.is_encoding and other.share.encoding == found.encoding:
                return other.request, 0
        return None

    # -- running ---------------------------------------------------------------------------------------------

    def admit(self, found: Found, headroom: int) -> bool:
        """Allocate all pages. Pages of a prefix that the request encodes stay its own until `book` inserts them."""
        request = self.request
        assert isinstance(found, Prefix)
        cache, share, behind = self.cache, self.share, found.match.pages
        node = cache.tree.lock_match(found.match)
        is_encoding = found.encoding is not None and not found.tokens
        missing = cache.pages_for(found.length) if is_encoding else 0
        private = self._num_private(found.measures)
        fresh = cache.allocate(missing + private, behind, request.owner, cached=missing)
        if fresh is None:
            cache.tree.unlock(node)
            return False
        cache.use(node)
        share.take(found)
        pages = fresh[:missing] if is_encoding else behind
        request.read([Segment(pages, share.length, node=node)] if share.encoding else [])
        request.sequence.pages = fresh[missing:]
        request.cached_tokens = 0 if is_encoding else len(behind) * cache.page_size
        share.is_encoding = is_encoding
        share.boundary = self.strategy.boundaries.get((share.encoding, share.length, share.depth))
        if share.bound is not None and share.encoding is not None:
            self._measured().requests += 1
        return True

    def grow(self, ahead: int = 0) -> bool:
        return True

    def work(self, limit: int) -> DenoiseWork:
        return next_work(self.request, self.share, self.strategy.num_layers, self._trial)

    def shrink(self, work: Work) -> bool:
        """False: rows with bidirectional attention cannot be split into several steps."""
        return False

    def rows(self, work: Work) -> list[RowSet]:
        assert isinstance(work, DenoiseWork)
        return plan_rows(work, self.share, self.strategy.num_layers, self.cache.page_size)

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        assert isinstance(work, DenoiseWork)
        request, share, trial = self.request, self.share, work.trial
        states, depth = (saved[0], share.depth) if trial is None else (saved[-1], trial.depth)
        if states is not None and self.strategy.boundaries.maxsize:
            # For other requests, and for this one's next refresh.
            if request.message.store:
                self.strategy.boundaries.put(share.encoding, depth, states)
            if depth == share.depth:
                share.boundary = states
        if share.is_encoding:
            self._insert(seconds)
            self.strategy.counters["encoded_prefixes"] += 1
            self.strategy.counters["prefill_tokens"] += work.num_rows
            return not request.wants_tokens
        if trial is not None:
            pages, half = request.sequence.pages, len(request.sequence.pages) // 2
            request.sequence.pages = pages[half:] + pages[:half]
        if share.drift is not None and work.start <= share.length:
            self._note_drift(share.drift, work)
        if work.refresh or trial is not None:
            share.refreshed_at = bidirectional(request).num_steps
            share.refreshes += 1
            self.strategy.counters["refreshes"] += 1
        return True

    def _insert(self, seconds: float) -> None:
        """Insert the encoded prefix into the tree, if the request allows it.

        Pages of this encoding that the tree has already are kept, because their KV is the same.
        """
        request = self.request
        share, (segment,) = self.share, request.segments
        share.is_encoding = False
        if not request.message.store:
            return
        assert share.encoding is not None
        key = request.tokens[: share.length]
        node, segment.pages = self.cache.insert(
            key.tobytes(), segment.pages, share.encoding, seconds, share.meta, request.owner
        )
        self.cache.tree.lock(node)
        segment.node = node
        self.strategy.encodings.add(key, request.namespace, share.encoding)

    def release(self, keep: bool) -> None:
        self.cache.release(self.request, self.request.message.hold_s)

    def distrust(self) -> None:
        """Remove the encoding from the cache, unless it is pinned or another running request reads it."""
        request = self.request
        self.cache.release(request)
        encoding = self.share.encoding
        if encoding is None:
            return
        found = self.cache.tree.match(request.key(self.share.length), encoding)
        for top in list(path(found.node))[-1:]:
            self.cache.distrust(top)
        self.strategy.boundaries.discard(encoding)

    def phase(self) -> str:
        return "encode" if self.share.is_encoding else "denoise"

    def report(self) -> SharedPrefixReport | None:
        share, canvas = self.share, self.canvas
        if canvas is None:
            return None
        report = SharedPrefixReport(
            shallow_depth=share.depth if share.encoding else 0,
            encoded_tokens=share.length if share.encoding else 0,
            unshared=UNSET if share.encoding else share.unshared,
            refreshes=share.refreshes,
            prefix_ratio=round(share.length / self.request.max_length, 4),
            denoise_steps=canvas.num_steps,
        )
        if share.bound is not None:
            report.divergence_bound, report.refresh_interval = share.bound, share.interval
            report.depth_divergence = share.divergence
        return report

    # -- measuring -------------------------------------------------------------------------------------------

    def _measured(self) -> MeasuredDepths:
        assert self.share.meta is not None
        return self.share.meta.measured.at(self.share.length / self.request.max_length)

    def _has_room(self, length: int) -> bool:
        """Whether a request has a canvas without guidance, and room in the pool for a second one to measure."""
        if self.canvas is None or self.canvas.params.cfg_scale:
            return False
        room = self.cache.pages_for(length) + 2 * self.cache.pages_for(self.request.max_length)
        return room <= self.cache.pool.num_pages

    def _trial(self) -> Trial | None:
        """The depth to measure at the first refresh, when all output is masked; None: nothing left to measure."""
        share = self.share
        assert share.bound is not None
        start = self.strategy.table.depth(share.length / self.request.max_length)
        depth = self._measured().trial(share.bound, start, self.strategy.num_layers)
        if depth <= 1:
            return None
        boundary = self.strategy.boundaries.get((share.encoding, share.length, depth))
        return Trial(depth, boundary, lambda nats: self._note(depth, nats))

    def _note(self, depth: int, nats: float) -> None:
        """Record a divergence and choose the request's depth anew; this step computed the prefix in all layers."""
        request = self.request
        share, measured = self.share, self._measured()
        assert share.bound is not None
        measured.note(depth, nats)
        fresh, cached = (
            slots_of(pages, np.arange(share.length), self.cache.page_size)
            for pages in (request.sequence.pages, request.segments[0].pages)
        )
        measured.reach = num_near_layers(self.cache.pool, fresh, cached)
        if depth == share.depth:
            share.divergence = nats
            self.strategy.counters["divergences"] += 1
            self.strategy.counters["divergences_exceeded"] += nats > share.bound
        chosen = measured.choose(share.bound, depth)
        if chosen != share.depth:
            share.depth, share.boundary = chosen, self.strategy.boundaries.get((share.encoding, share.length, chosen))

    def _note_drift(self, drift: Drift, work: DenoiseWork) -> None:
        request, share = work.request, self.share
        rows = np.arange(share.length, request.prompt_len)
        slots = slots_of(request.sequence.pages, rows, self.cache.page_size)
        drift.note(self.cache.pool, slots, range(share.depth, self.strategy.num_layers), work.refresh)


class BiCache(Strategy[None]):
    """The depth table, the encodings in the tree, and the boundary states that requests share."""

    name = "bicache"
    unchunkable = True
    counted = ("prefill_tokens", "encoded_prefixes", "refreshes", "divergences", "divergences_exceeded")

    def __init__(
        self,
        config: DiffusionConfig,
        table: DepthTable,
        spec: DiffusionSpec,
        num_layers: int,
        cache: PagedCache,
        by_default: bool = True,
    ):
        """`by_default`: whether requests without `reuse` share prefixes."""
        super().__init__(cache, num_layers)
        self._by_default = by_default
        self.config, self.table, self.spec = config, table, spec
        self.encodings = Encodings(cache.tree)
        self.boundaries = BoundaryStore(_BOUNDARY_BYTES)

    @classmethod
    def load(cls, opening: Opening, spec: DiffusionSpec) -> BiCache:
        """The strategy for a model, with its depth table. Raises ModelError if the table is invalid."""
        config, model = opening.config, opening.executor.spec
        table = choose_table(config.diffusion.depth_table, opening.path, model)
        by_default = config.cache.reuse == "auto"
        return cls(config.diffusion, table, spec, model.num_layers, opening.cache, by_default)

    @property
    def info(self) -> DiffusionInfo:
        """The model and its table, for the front end."""
        return DiffusionInfo(
            self.spec.mask_token_id,
            self.spec.algorithm,
            self.num_layers,
            self.table.version,
            self._default_interval(None),
            depth_bound=self.config.depth_bound,
        )

    def _default_interval(self, depth: int | None) -> int:
        """Denoising steps between refreshes; 1 without a table or a depth, which is exact with the default depth 1."""
        is_exact = self.table is NO_TABLE and depth is None
        return 1 if is_exact else self.table.interval or _INTERVAL

    def open(self, request: Request, ask: None) -> BiCacheLease:
        """A request without a canvas asks for no tokens: it only encodes its whole prompt."""
        if request.decoding_state is None:
            return BiCacheLease(self, request, Share(declared=request.prompt_len, wanted_depth=1))
        params = bidirectional(request).params
        bound = self.config.depth_bound if params.depth_bound is None else params.depth_bound
        default = 1 if bound == 0 else self._default_interval(params.depth)
        share = Share(
            reuse=self._by_default if params.reuse is None else params.reuse,
            declared=params.prefix_tokens,
            wanted_depth=params.depth,
            bound=bound,
            interval=params.refresh_interval or default,
            drift=Drift(params.drift_threshold) if params.refresh == "drift" else None,
        )
        return BiCacheLease(self, request, share)

    def runs(self, tokens: array[int], namespace: Namespace, ask: None = None) -> list[Run]:
        return [Run(tokens, encoding_of(tokens.tobytes(), namespace))]

    def restored(self, tokens: array[int], namespace: Namespace) -> None:
        if self.encodings.match(tokens.tobytes(), namespace):
            self.encodings.add(tokens, namespace.without_entry, namespace)

    def meta_of(self, namespace: Namespace, described: Mapping[str, object]) -> ShallowMeta | None:
        if not namespace.entry.startswith("bicache:"):
            return None
        return ShallowMeta(msgspec.convert(described["encoded_tokens"], int), self.table)

    def flush(self) -> None:
        self.boundaries.clear()
