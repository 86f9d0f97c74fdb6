"""Operators' calls on a running engine: state, pins, the tree and its nodes, pause and flush."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any, Protocol

from radix import Block, Namespace, Node, outline, path, slices, view
from radix.stats import Histogram
from runtime import protocol
from runtime.engine.adapters import Adapters
from runtime.engine.scheduler import Scheduler
from runtime.errors import InvalidRequest
from runtime.kv.cache import PagedCache
from runtime.kv.tiers.tiers import Tiers
from runtime.request import Request, Status
from runtime.reuse.strategy import Strategy
from runtime.sampling.drafts.drafter import Drafter

_Walk = Generator[None, None, list[Block]]


class _Core(Protocol):
    """The attributes of `EngineCore` that `Admin` reads; it sets `paused`."""

    adapters: Adapters
    cache: PagedCache
    scheduler: Scheduler
    strategies: dict[str, Strategy]
    requests: dict[str, Request]
    counters: dict[str, int]
    step_rows: Histogram
    drafter: Drafter | None
    paused: bool
    tiers: Tiers | None

    def strategy_of(self, asked: dict[str, Any]) -> Strategy: ...


class Admin:
    """Answers operators' calls, each in a time that requests hardly notice.

    A node is named by its first page and the number of tokens before it. The name no longer fits once the page belongs
    to another node.
    """

    def __init__(self, core: _Core):
        self._core = core
        self._walk: _Walk | None = None
        self._slices: Iterator[list[tuple[Node, int]]] = iter(())
        self._answers: dict[type, Callable[[Any], dict[str, Any]]] = {
            protocol.AttachTier: lambda _: {"failed": "there is no prefix cache below which a tier could be"},
            protocol.DetachTier: lambda _: {"found": False},
            protocol.EraseTenant: lambda message: self.erase(message.tenant),
            protocol.FlushCache: lambda message: self.flush(message.pins),
            protocol.GetCached: self._cached,
            protocol.GetOutline: self.outline,
            protocol.GetPins: lambda _: self.pins(),
            protocol.GetQuota: lambda message: self.quota(Namespace(message.tenant)),
            protocol.GetRequests: lambda message: self.requests(message.limit, message.tenant),
            protocol.GetRuns: self.runs,
            protocol.GetState: lambda _: self.state(),
            protocol.GetTree: self.tree,
            protocol.LoadAdapter: lambda message: self._core.adapters.load(message),
            protocol.OnNode: lambda message: getattr(self, f"_{message.verb}")(self._find(message.page, message.start)),
            protocol.Pause: self._pause,
            protocol.Ping: lambda _: {},
            protocol.RemovePin: lambda message: {"found": self._core.cache.pins.unpin(message.pin)},
            protocol.UnloadAdapter: lambda message: self._core.adapters.unload(message),
        }

    def handle(self, message: protocol.Call) -> protocol.Reply:
        return protocol.Reply(message.call, self._answers[type(message)](message))

    def flush(self, pins: bool = False) -> dict[str, Any]:
        """Drop the cached pages that no live request uses; `pins`: the pinned ones, too. Tokens dropped and left."""
        cache = self._core.cache
        cache.pins.expire()
        for strategy in self._core.strategies.values():
            strategy.flush()
        if self._core.drafter is not None:
            self._core.drafter.clear()
        if pins:
            cache.pins.unpin_all()
        return {
            "flushed_tokens": cache.flush() * cache.page_size,
            "live_tokens": cache.tree.num_pages * cache.page_size,
        }

    def erase(self, tenant: str) -> dict[str, Any]:
        """Drop a tenant's pins, and its pages that no live request uses. Tokens dropped."""
        cache = self._core.cache
        for strategy in self._core.strategies.values():
            strategy.flush()
        for pin in [pin for pin in cache.pins.pins.values() if pin.namespace.tenant == tenant]:
            cache.pins.unpin(pin.id)
        roots = [root for namespace, root in cache.tree.roots() if namespace.tenant == tenant]
        pages = sum(cache.drop(node) for root in roots for node in list(root.children.values()))
        return {"erased_tokens": pages * cache.page_size}

    def pins(self) -> dict[str, Any]:
        """All pins, sums of what tenants keep, and the tokens of the budget that these hold together."""
        board, page_size = self._core.cache.pins, self._core.cache.page_size
        board.expire()
        return {
            "pins": [board.describe(pin) for pin in board.pins.values()],
            "kept": board.describe_kept(),
            "pinned_tokens": self._core.cache.tree.num_pinned_pages * page_size,
            "budget_tokens": board.budget_pages * page_size,
        }

    def _cached(self, message: protocol.GetCached) -> dict[str, Any]:
        """Tokens of entries that lie in the tree, by the entries' names; none of what can never be served."""
        cache, asked = self._core.cache, message.reuse
        found: dict[str, Any] = {}
        try:
            runs = self._core.strategy_of(asked).runs(array("i", message.tokens), message.namespace, asked)
        except InvalidRequest:
            return found
        for run in runs:
            rows = run.tokens[: len(cache.tree.match(run.tokens.tobytes(), run.namespace).pages) * cache.page_size]
            name = run.name or ""
            found[name] = found.get(name, 0) + len(rows) - rows.count(-1)  # which fills the last page
        return found

    def _pause(self, message: protocol.Pause) -> dict[str, Any]:
        self._core.paused = message.paused
        return {"paused": message.paused}

    def requests(self, limit: int, tenant: str | None = None) -> dict[str, Any]:
        """The live requests of a tenant, or of all, oldest first."""
        now_s = time.monotonic()
        live = (r for r in self._core.requests.values() if tenant is None or r.namespace.tenant == tenant)
        return {"requests": [_describe(request, now_s) for request in islice(live, limit)]}

    def quota(self, owner: Namespace) -> dict[str, Any]:
        """Pages in the tree that count against an owner's quota, and the quota; both None where there is none."""
        quotas = self._core.cache.tree.quotas
        limit = None if quotas is None else quotas.limit(owner)
        return {"quota_pages": limit, "used_pages": None if quotas is None or limit is None else quotas.pages(owner)}

    # -- the tree --------------------------------------------------------------------------------------------

    def tree(self, asked: protocol.GetTree) -> dict[str, Any]:
        """A page of the tree's nodes, parents first."""
        self._core.cache.pins.expire()
        nodes = view(
            self._core.cache.tree,
            _of(asked.tenant),
            asked.max_depth,
            asked.skip,
            asked.limit,
            asked.preview_tokens,
        )
        return {"nodes": [asdict(node) for node in nodes]}

    def outline(self, asked: protocol.GetOutline) -> dict[str, Any]:
        """Advance a walk over the tree, or begin one: `{"blocks": None}` until it has reached its end.

        Then there are the last evictions, too. From the first walk on, the reasons of misses are counted.

        With `anew`, an unfinished walk is dropped: the tree has changed since.
        """
        self._core.cache.remember()
        wanted = _of(asked.tenant)
        if self._walk is None or asked.anew:
            self._walk = outline(self._core.cache.tree, asked.limit, asked.preview_tokens, wanted)
        try:
            next(self._walk)
        except StopIteration as end:
            self._walk = None
            last = self._core.cache.evictions.last
            evictions = [asdict(eviction) for eviction in last if wanted(eviction.namespace)]
            return {"blocks": [asdict(block) for block in end.value], "evictions": evictions}
        return {"blocks": None}

    def runs(self, asked: protocol.GetRuns) -> dict[str, Any]:
        """The next slice of all nodes, parents first: `{"runs"}`, None behind the last. One walk at a time."""
        if asked.anew:
            of_tenant = _of(asked.tenant)
            self._slices = slices(
                self._core.cache.tree, lambda space: of_tenant(space) and asked.salt in (None, space.salt)
            )
        found = next(self._slices, None)
        return {"runs": None if found is None else [_run(node, start) for node, start in found]}

    def _find(self, page: int, start: int) -> Node | None:
        """The node named by its first page and the tokens before it. Walks the tree."""
        tree = self._core.cache.tree
        for node in tree.nodes():
            if node.pages[0] == page:
                before = sum(len(above.pages) for above in path(node)) - len(node.pages)
                return node if before * tree.page_size == start else None
        return None

    def _pin(self, node: Node | None) -> dict[str, Any]:
        """Pin the prefix that ends with a node: `{"found"}` and what `PinBoard.pin_node` returns."""
        return {"found": False} if node is None else {"found": True, **self._core.cache.pins.pin_node(node)}

    def _unpin(self, node: Node | None) -> dict[str, Any]:
        """Remove every pin that keeps a node: `{"found", "pins": their ids}`; tenants keep it no more, either."""
        return {"found": node is not None, "pins": [] if node is None else self._core.cache.pins.unpin_node(node)}

    def _drop(self, node: Node | None) -> dict[str, Any]:
        """Evict a node and everything below it that neither live requests nor pins keep: `{"found", "tokens"}`."""
        freed = 0 if node is None else self._core.cache.drop(node)
        return {"found": node is not None, "tokens": freed * self._core.cache.page_size}

    def _read(self, node: Node | None) -> dict[str, Any]:
        """All tokens up to the end of a node, int32, those before it first: `{"found", "tokens"}`."""
        return {"found": node is not None, "tokens": b"".join(above.key for above in reversed(list(path(node))))}

    # -- counters --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Counters and histograms, which only grow, and gauges."""
        core, cache = self._core, self._core.cache
        cache.pins.expire()
        tree, stats, page_size = cache.tree, cache.tree.stats, cache.page_size
        return {
            **core.counters,
            "evicted_tokens": sum(stats.evicted.values()) * page_size,
            "evicted_tokens_by_cause": {cause: pages * page_size for cause, pages in stats.evicted.items()},
            "evicted_tokens_by_tenant": {name: pages * page_size for name, pages in cache.evictions.pages.items()},
            "missed_tokens_by_reason": dict(cache.missed),
            "retracted_requests": core.scheduler.num_retracted,
            "running": len(core.scheduler.running),
            "waiting": len(core.scheduler.waiting) + len(core.scheduler.blocked),
            "blocked": len(core.scheduler.blocked),
            "paused": int(core.paused),
            "pages_total": cache.pool.num_pages,
            "pages_free": cache.allocator.num_free,
            "pages_tree": tree.num_pages,
            "pages_private": cache.pool.num_pages - cache.allocator.num_free - tree.num_pages,
            "pages_locked": tree.num_locked_pages - tree.num_pinned_pages,
            "pages_pinned": tree.num_pinned_pages,
            "pins": len(cache.pins.pins),
            "pins_refused": cache.pins.num_refused,
            "pins_broken": cache.pins.num_broken,
            "keeps": len(cache.pins.keeps.keeps),
            "keeps_refused": cache.pins.num_unkept,
            "keeps_broken": cache.pins.num_displaced,
            "tree_nodes": tree.num_nodes,
            "requests_by_adapter": dict(core.adapters.requests),
            **({} if core.tiers is None else core.tiers.state()),
            "idle_before_evict_s": _plain(stats.idle_s),
            "lifetime_s": _plain(stats.lifetime_s),
            "reuse_gap_s": _plain(stats.reuse_gap_s),
            "step_rows": _plain(core.step_rows),
            **{name: value for strategy in core.strategies.values() for name, value in strategy.figures().items()},
        }


def _of(tenant: str | None) -> Callable[[Namespace], bool]:
    return lambda namespace: tenant is None or namespace.tenant == tenant


def _run(node: Node, start: int) -> dict[str, Any]:
    above = node.parent.pages if node.parent is not None else ()
    return {
        **{"id": node.pages[0], "parent": above[0] if above else None, "start": start, "key": node.key},
        **{"tenant": node.namespace.tenant, "hits": node.hits, "pinned": node.pins > 0},
    }


def _describe(request: Request, now_s: float) -> dict[str, Any]:
    """A live request as shown to operators, without its text."""
    running = request.status is Status.RUNNING
    return {
        "rid": request.rid,
        "tenant": request.namespace.tenant,
        "prompt_tokens": request.num_prompt,
        "cached_tokens": max(request.cached_tokens, 0),
        "computed_tokens": max(min(request.num_present, request.num_prompt) - max(request.cached_tokens, 0), 0),
        "output_tokens": request.num_output,
        "max_tokens": request.max_tokens - request.prompt_len,
        "age_s": now_s - request.arrival_s,
        "phase": request.strategy.phase(request) if running else request.status.value,
    }


def _plain(histogram: Histogram) -> dict[str, Any]:
    return {"bounds": histogram.bounds, "counts": histogram.counts, "total": histogram.total}
