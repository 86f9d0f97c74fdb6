"""Operators' calls on a running engine: state, tree and nodes, requests, quotas, pause and flush."""

import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext, suppress
from itertools import islice

from radix import Namespace, Node, path, text_of_path
from radix.node import num_unpadded
from runtime import calls
from runtime.engine.core import EngineCore
from runtime.engine.part import Part
from runtime.errors import InvalidRequest
from runtime.kv.segments import Run
from runtime.request import Request, Status

# Number of entries to match between two steps.
_MATCHED = 64


class Operators(Part):
    """Answers operators' calls. A long answer is spread over many steps, so that it hardly delays requests."""

    def __init__(self, core: EngineCore):
        self._core, self._cache = core, core.cache
        self._slices: Iterator[list[tuple[Node, int]]] = iter(())

    def answers(self) -> calls.Answers:
        return (
            calls.DropNode.by(self._drop),
            calls.EraseTenant.by(self._erase),
            calls.FlushCache.by(self._flush),
            calls.GetCached.by(self._cached),
            calls.GetOutline.by(self._outline),
            calls.GetQuota.by(self._quota),
            calls.GetRequests.by(self._requests),
            calls.GetRuns.by(self._runs),
            calls.GetState.by(lambda _: self._core.state()),
            calls.GetTree.by(self._tree),
            calls.Pause.by(self._pause),
            calls.Ping.by(lambda _: None),
            calls.PinNode.by(self._pin),
            calls.ReadNode.by(self._read),
            calls.UnpinNode.by(self._unpin),
        )

    def _flush(self, call: calls.FlushCache) -> Generator[None, None, calls.Flushed]:
        cache = self._cache
        cache.pins.expire()
        self._forget()
        if call.pins:
            cache.pins.unpin_all()
        with nullcontext() if call.pins else cache.holds.spared():
            flushed = cache.flush()
        live = cache.tree.num_pages
        erased = (yield from self._erase_blocks(None)) if call.tiers else None
        return calls.Flushed(flushed * cache.page_size, live * cache.page_size, erased)

    def _erase(self, call: calls.EraseTenant) -> Generator[None, None, calls.Erased]:
        cache = self._cache
        self._forget()
        self._slices = iter(())
        cache.pins.unpin_all(call.tenant)
        roots = [root for namespace, root in cache.tree.roots() if namespace.tenant == call.tenant]
        pages = sum(cache.drop(node) for root in roots for node in list(root.children.values()))
        try:
            blocks = yield from self._erase_blocks(call.tenant)
        finally:  # also if the call is cancelled
            for part in self._core.parts:
                part.erase(call.tenant)
        return calls.Erased(pages * cache.page_size, blocks)

    def _erase_blocks(self, tenant: str | None) -> Generator[None, None, dict[str, int | None]]:
        erased: dict[str, int | None] = {}
        for part in self._core.parts:
            erased |= yield from part.erase_blocks(tenant)
        return erased

    def _forget(self) -> None:
        """Drop what strategies and parts keep beside the tree."""
        for strategy in self._core.strategies.opened.values():
            strategy.flush()
        for flush in self._core.parts.flush:
            flush()

    def _cached(self, call: calls.GetCached) -> Generator[None, None, dict[str, int]]:
        """Number of cached tokens by entry name, a few entries per step. Entries that cannot be served are left out."""
        found: dict[str, int] = {}
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
        return num_unpadded(rows)

    def _pause(self, call: calls.Pause) -> bool:
        self._core.paused = call.paused
        return call.paused

    def _requests(self, call: calls.GetRequests) -> list[calls.LiveRequest]:
        now_s, tenant = time.monotonic(), call.tenant
        live = (r for r in self._core.requests.values() if tenant is None or r.namespace.tenant == tenant)
        return [_describe(request, now_s) for request in islice(live, call.limit)]

    def _quota(self, call: calls.GetQuota) -> calls.Quota:
        quotas, owner = self._cache.tree.quotas, Namespace(call.tenant)
        assert quotas is not None
        return calls.Quota(quotas.limit(owner), quotas.pages(owner))

    # -- the tree --------------------------------------------------------------------------------------------

    def _tree(self, call: calls.GetTree) -> Generator[None, None, calls.Nodes]:
        from radix.inspection import view

        self._cache.expire()
        tree, wanted = self._cache.tree, _of(call.tenant)
        nodes = view(tree, wanted, call.max_depth, call.skip, call.limit, call.preview_tokens)
        return calls.Nodes(nodes, (yield from self._tiers_of([node.id for node in nodes])))

    def _outline(self, call: calls.GetOutline) -> Generator[None, None, calls.Outline]:
        """Walk over the tree, which may change between the steps of the walk."""
        from radix.inspection import outline

        self._cache.remember()
        wanted = _of(call.tenant)
        found = yield from outline(self._cache.tree, call.limit, call.preview_tokens, wanted)
        tiers = yield from self._tiers_of([block.id for block in found])
        return calls.Outline(found, tiers, [one for one in self._cache.evictions.last if wanted(one.namespace)])

    def _tiers_of(self, nodes: Sequence[int]) -> Generator[None, None, dict[int, list[str]] | None]:
        for part in self._core.parts:
            if (found := (yield from part.tiers_of(nodes))) is not None:
                return found
        return None

    def _runs(self, call: calls.GetRuns) -> list[calls.TreeRun] | None:
        if call.anew:
            from radix.inspection import slices

            of_tenant, salt = _of(call.tenant), call.salt
            self._slices = slices(self._cache.tree, lambda space: of_tenant(space) and salt in (None, space.salt))
        found = next(self._slices, None)
        return None if found is None else [_run(node, start) for node, start in found]

    def _pin(self, call: calls.PinNode) -> calls.PinView | None:
        return None if (node := self._find(call)) is None else self._cache.pins.pin_node(node)

    def _unpin(self, call: calls.UnpinNode) -> list[str] | None:
        return None if (node := self._find(call)) is None else self._cache.pins.unpin_node(node)

    def _drop(self, call: calls.DropNode) -> int | None:
        return None if (node := self._find(call)) is None else self._cache.drop(node) * self._cache.page_size

    def _read(self, call: calls.ReadNode) -> bytes | None:
        return None if (node := self._find(call)) is None else text_of_path(node)

    def _find(self, call: calls.OnNode[object]) -> Node | None:
        """The node of a call; None if there is none. Walks the tree."""
        tree = self._cache.tree
        for node in tree.nodes():
            if node.pages[0] == call.page:
                before = sum(len(above.pages) for above in path(node)) - len(node.pages)
                return node if before * tree.page_size == call.start else None
        return None

    # -- counters --------------------------------------------------------------------------------------------

    def report(self, state: calls.State) -> None:
        core, cache, holds = self._core, self._cache, self._cache.holds
        cache.expire()
        tree, stats, page_size = cache.tree, cache.tree.stats, cache.page_size
        for opened in core.strategies.opened.values():
            state.figures |= opened.figures()
        state.labelled |= {
            "evicted_tokens_by_cause": {cause: pages * page_size for cause, pages in stats.evicted.items()},
            "evicted_tokens_by_tenant": {name: pages * page_size for name, pages in cache.evictions.pages.items()},
            "missed_tokens_by_reason": dict(cache.missed),
        }
        state.histograms |= {
            "idle_before_evict_s": stats.idle_s,
            "lifetime_s": stats.lifetime_s,
            "reuse_gap_s": stats.reuse_gap_s,
            "step_rows": core.step_rows,
        }
        state.figures |= {
            **core.totals(),
            "evicted_tokens": sum(stats.evicted.values()) * page_size,
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
        }


def _of(tenant: str | None) -> Callable[[Namespace], bool]:
    return lambda namespace: tenant is None or namespace.tenant == tenant


def _run(node: Node, start: int) -> calls.TreeRun:
    above = node.parent.pages if node.parent is not None else ()
    return calls.TreeRun(
        id=node.pages[0],
        parent=above[0] if above else None,
        start=start,
        key=node.key,
        tenant=node.namespace.tenant,
        hits=node.hits,
        pinned=node.pins > 0,
    )


def _describe(request: Request, now_s: float) -> calls.LiveRequest:
    running = request.status is Status.RUNNING
    return calls.LiveRequest(
        rid=request.rid,
        tenant=request.namespace.tenant,
        prompt_tokens=request.num_prompt,
        cached_tokens=max(request.cached_tokens, 0),
        computed_tokens=max(min(request.num_present, request.num_prompt) - max(request.cached_tokens, 0), 0),
        output_tokens=request.num_output,
        max_tokens=request.max_length - request.prompt_len,
        age_s=now_s - request.arrival_s,
        phase=request.lease.phase() if running else request.status.value,
    )
