"""Operators' calls on a running engine: state, tree and nodes, requests, quotas, pause and flush."""

import time
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from itertools import islice
from typing import Any

from radix import Namespace, Node, path, text_of_path
from radix.stats import Histogram
from runtime import calls
from runtime.engine.core import EngineCore
from runtime.engine.part import Answer, Handler, Part
from runtime.errors import InvalidRequest, PinRefused
from runtime.kv.segments import Run
from runtime.request import Request, Status

# Number of entries to match between two steps.
_MATCHED = 64


class Operators(Part):
    """Answers operators' calls. A long answer is spread over many steps, so that it hardly delays requests."""

    def __init__(self, core: EngineCore):
        self._core, self._cache = core, core.cache
        self._slices: Iterator[list[tuple[Node, int]]] = iter(())

    def answers(self) -> Mapping[type[calls.Call], Handler]:
        return {
            calls.EraseTenant: self._erase,
            calls.FlushCache: self._flush,
            calls.GetCached: self._cached,
            calls.GetOutline: self._outline,
            calls.GetQuota: self._quota,
            calls.GetRequests: self._requests,
            calls.GetRuns: self._runs,
            calls.GetState: lambda _: self._core.state(),
            calls.GetTree: self._tree,
            calls.OnNode: self._on_node,
            calls.Pause: self._pause,
            calls.Ping: lambda _: {},
        }

    def _flush(self, call: calls.FlushCache) -> Answer:
        cache = self._cache
        cache.pins.expire()
        self._forget()
        if call.pins:
            cache.pins.unpin_all()
        with nullcontext() if call.pins else cache.holds.spared():
            flushed = cache.flush()
        erased: Answer = {"erased_blocks": {}} if call.tiers else {}
        return erased | {
            "flushed_tokens": flushed * cache.page_size,
            "live_tokens": cache.tree.num_pages * cache.page_size,
        }

    def _erase(self, call: calls.EraseTenant) -> Answer:
        cache = self._cache
        self._forget()
        self._slices = iter(())
        cache.pins.unpin_all(call.tenant)
        roots = [root for namespace, root in cache.tree.roots() if namespace.tenant == call.tenant]
        pages = sum(cache.drop(node) for root in roots for node in list(root.children.values()))
        return {"erased_tokens": pages * cache.page_size, "erased_blocks": {}}

    def _forget(self) -> None:
        """Drop what strategies and parts keep beside the tree."""
        for strategy in self._core.strategies.opened.values():
            strategy.flush()
        for flush in self._core.parts.flush:
            flush()

    def _cached(self, call: calls.GetCached) -> Generator[None, None, Answer]:
        """Number of cached tokens by entry name, a few entries per step. Entries that cannot be served are left out."""
        found: Answer = {}
        try:
            strategy = self._core.strategies.serving(call.ask)
        except InvalidRequest:
            return found
        for some in strategy.slices(call.ask, min(_MATCHED, self._cache.pool.num_pages)):
            with suppress(InvalidRequest):
                for run in strategy.runs(array("i", call.tokens), call.namespace, some):
                    found[run.name or ""] = found.get(run.name or "", 0) + self._num_cached(run)
            yield
        return found

    def _num_cached(self, run: Run) -> int:
        tree, page_size = self._cache.tree, self._cache.page_size
        rows = run.tokens[: len(tree.match(run.tokens.tobytes(), run.namespace).pages) * page_size]
        return sum(map((0).__le__, rows))  # negative ones fill pages

    def _pause(self, call: calls.Pause) -> Answer:
        self._core.paused = call.paused
        return {"paused": call.paused}

    def _requests(self, call: calls.GetRequests) -> Answer:
        now_s, tenant = time.monotonic(), call.tenant
        live = (r for r in self._core.requests.values() if tenant is None or r.namespace.tenant == tenant)
        return {"requests": [_describe(request, now_s) for request in islice(live, call.limit)]}

    def _quota(self, call: calls.GetQuota) -> Answer:
        quotas, owner = self._cache.tree.quotas, Namespace(call.tenant)
        assert quotas is not None
        return {"quota_pages": quotas.limit(owner), "used_pages": quotas.pages(owner)}

    # -- the tree --------------------------------------------------------------------------------------------

    def _tree(self, call: calls.GetTree) -> Generator[None, None, Answer]:
        from radix.inspection import view

        self._cache.expire()
        tree, wanted = self._cache.tree, _of(call.tenant)
        nodes = [
            asdict(node) for node in view(tree, wanted, call.max_depth, call.skip, call.limit, call.preview_tokens)
        ]
        yield from self._mark(nodes)
        return {"nodes": nodes}

    def _outline(self, call: calls.GetOutline) -> Generator[None, None, Answer]:
        """Walk over the tree, which may change between the steps of the walk."""
        from radix.inspection import outline

        self._cache.remember()
        wanted = _of(call.tenant)
        found = yield from outline(self._cache.tree, call.limit, call.preview_tokens, wanted)
        blocks = [asdict(block) for block in found]
        yield from self._mark(blocks)
        last = self._cache.evictions.last
        return {"blocks": blocks, "evictions": [asdict(one) for one in last if wanted(one.namespace)]}

    def _mark(self, nodes: list[dict[str, Any]]) -> Iterator[None]:
        """Add to each node what parts know of it, such as the tiers that hold it."""
        for part in self._core.parts:
            yield from part.mark(nodes)

    def _runs(self, call: calls.GetRuns) -> Answer:
        if call.anew:
            from radix.inspection import slices

            of_tenant, salt = _of(call.tenant), call.salt
            self._slices = slices(self._cache.tree, lambda space: of_tenant(space) and salt in (None, space.salt))
        found = next(self._slices, None)
        return {"runs": None if found is None else [_run(node, start) for node, start in found]}

    def _on_node(self, call: calls.OnNode) -> Answer:
        cache, node = self._cache, self._find(call.page, call.start)
        if node is None:
            return {"found": False}
        if call.verb == "unpin":
            return {"found": True, "pins": cache.pins.unpin_node(node)}
        if call.verb == "drop":
            return {"found": True, "tokens": cache.drop(node) * cache.page_size}
        if call.verb == "read":
            return {"found": True, "tokens": text_of_path(node)}
        answer = cache.pins.pin_node(node)
        if "refused" in answer:
            raise PinRefused(answer["refused"])
        return {"found": True, **answer}

    def _find(self, page: int, start: int) -> Node | None:
        """The node with this first page and `start` tokens before it; None if there is none. Walks the tree."""
        tree = self._cache.tree
        for node in tree.nodes():
            if node.pages[0] == page:
                before = sum(len(above.pages) for above in path(node)) - len(node.pages)
                return node if before * tree.page_size == start else None
        return None

    # -- counters --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        core, cache, holds = self._core, self._cache, self._cache.holds
        cache.expire()
        tree, stats, page_size = cache.tree, cache.tree.stats, cache.page_size
        return {
            **core.totals(),
            "evicted_tokens": sum(stats.evicted.values()) * page_size,
            "evicted_tokens_by_cause": {cause: pages * page_size for cause, pages in stats.evicted.items()},
            "evicted_tokens_by_tenant": {name: pages * page_size for name, pages in cache.evictions.pages.items()},
            "missed_tokens_by_reason": dict(cache.missed),
            "retracted_requests": core.scheduler.num_retracted,
            "running": len(core.scheduler.running),
            "waiting": len(core.scheduler.waiting) + core.scheduler.num_blocked,
            "blocked": core.scheduler.num_blocked,
            "paused": int(core.paused),
            "pages_total": cache.pool.num_pages,
            "pages_free": cache.allocator.num_free,
            "pages_tree": tree.num_pages,
            "pages_private": cache.pool.num_pages - cache.allocator.num_free - tree.num_pages,
            "pages_locked": tree.num_locked_pages - tree.num_pinned_pages,
            "pages_pinned": tree.num_pinned_pages,
            "pages_held": holds.num_pages,
            "held_pages_lost": holds.num_lost,
            "held_pages_broken": holds.num_broken,
            "pins": len(cache.pins.pins),
            "pins_refused": cache.pins.num_refused,
            "pins_broken": cache.pins.num_broken,
            "keeps": len(holds.kept),
            "keeps_refused": holds.num_refused,
            "keeps_broken": holds.num_kept_lost,
            "tree_nodes": tree.num_nodes,
            "idle_before_evict_s": _plain(stats.idle_s),
            "lifetime_s": _plain(stats.lifetime_s),
            "reuse_gap_s": _plain(stats.reuse_gap_s),
            "step_rows": _plain(core.step_rows),
            **{name: value for opened in core.strategies.opened.values() for name, value in opened.figures().items()},
        }


def _of(tenant: str | None) -> Callable[[Namespace], bool]:
    return lambda namespace: tenant is None or namespace.tenant == tenant


def _run(node: Node, start: int) -> dict[str, Any]:
    above = node.parent.pages if node.parent is not None else ()
    return {
        "id": node.pages[0],
        "parent": above[0] if above else None,
        "start": start,
        "key": node.key,
        "tenant": node.namespace.tenant,
        "hits": node.hits,
        "pinned": node.pins > 0,
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
        "max_tokens": request.max_length - request.prompt_len,
        "age_s": now_s - request.arrival_s,
        "phase": request.lease.phase() if running else request.status.value,
    }


def _plain(histogram: Histogram) -> dict[str, Any]:
    return {"bounds": histogram.bounds, "counts": histogram.counts, "total": histogram.total}
