"""Ownership of pages: joins the tree, the allocator and the pool for requests."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from radix import EventLog, Evictions, Gone, Holds, Meta, Namespace, Node, Quotas, RadixTree, make_policy, path
from radix.node import TOKEN_BYTES
from runtime.config import CacheConfig
from runtime.kv.allocator import PageAllocator
from runtime.kv.pins import PinBoard
from runtime.kv.pool import KVPool
from runtime.kv.segments import Holder, Segment

if TYPE_CHECKING:
    from runtime.kv.near import NearPages


class PagedCache:
    """Allocates pages to requests, and caches the KV that they compute.

    Every page is free, held by the tree, or private to a live request. Pages move one way: a request fills private
    pages, `insert` hands full pages to the tree, and eviction frees them.

    Attributes:
        on_use: called after each use of a path, with its last node.
        on_distrust: called with a node whose KV may be damaged, like everything below it.
        held: locked paths and pages for KV that is being loaded.
        holds: the paths that are evicted last, for a time.
        near: pages with KV of the layers with a window; None: all pages have it.
        missed: prompt tokens that were not cached, by reason; counted from the first call of `remember`.
    """

    def __init__(
        self,
        pool: KVPool,
        config: CacheConfig,
        quotas: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`quotas`: most pages by tenant; other tenants have the configured quota."""
        self.pool = pool
        self.near: NearPages | None = None
        self.held: list[Segment] = []
        self.missed: Counter[str] = Counter()
        self.on_use: Callable[[Node], None] | None = None
        self.on_distrust: Callable[[Node], None] | None = None
        self.page_size = pool.page_size
        self.enabled = config.prefix_cache
        self.allocator = PageAllocator(pool.num_pages)
        policy = make_policy(config.eviction_policy, pool.num_pages)
        self.events = EventLog() if config.kv_events else None
        limits = Quotas(quotas or {}, config.tenant_quota)
        self.gone: Gone | None = None
        self.evictions = Evictions(policy, clock)
        watchers = (self.evictions,) if self.events is None else (self.evictions, self.events)
        self.tree = RadixTree(pool.page_size, policy, clock, limits, watchers)
        self.holds = Holds(self.tree, int(config.pin_budget * pool.num_pages))
        self.pins = PinBoard(self.tree, self.holds)
        self._hold_s = config.hold_s

    def remember(self) -> Gone:
        """The memory of pages that leave the tree. It begins with the first call, since it makes evictions slower."""
        if self.gone is None:
            self.gone = Gone(self.page_size * TOKEN_BYTES, self.tree.now)
            self.tree.watch(self.gone)
        return self.gone

    @property
    def num_available(self) -> int:
        """Pages that are free or could be evicted now."""
        return self.allocator.num_free + self.tree.num_evictable_pages

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def insert(
        self,
        key: bytes,
        pages: array[int],
        namespace: Namespace,
        cost: float = 0.0,
        meta: Meta | None = None,
        owner: Namespace | None = None,
    ) -> tuple[Node | None, array[int]]:
        """Hand pages to the tree; copies of pages that the tree already has are freed.

        Args:
            key: the tokens of these pages and of all before them, see `RadixTree.insert`.
            pages: int32 page ids for the whole key.
            namespace: the key's namespace.
            cost: seconds that it took to compute the pages.
            meta: a strategy's record, kept on the nodes.
            owner: the namespace whose quota the new pages count against; default: the owner of `namespace`.

        Returns:
            The node that holds the last page, and the page ids that the tree holds for the key.
        """
        node, held = self.tree.insert(key, pages, namespace, cost, meta, owner)
        self.allocator.release([mine for mine, theirs in zip(pages, held, strict=True) if mine != theirs])
        return node, held

    def use(self, node: Node | None) -> None:
        """Count an admitted request's use of the path that ends in `node`, and renew its holds that slide."""
        self.tree.use(node)
        self.holds.renew(node)
        if node is not None and self.on_use is not None:
            self.on_use(node)

    def leave(self, segment: Segment, hold_s: float | None = 0.0) -> None:
        """Release a segment: unlock its node, or free its pages if they belong to the request alone.

        `hold_s`: seconds for which the node's path is held from now on; None: the configured time.
        """
        if segment.node is None:
            self.allocator.release(segment.pages)
        else:
            self.tree.touch(segment.node)
            self.hold(segment.node, hold_s)
            self.tree.unlock(segment.node)

    def hold(self, node: Node, hold_s: float | None) -> None:
        """Hold the path that ends in a node; `hold_s`: see `leave`."""
        seconds = self._hold_s if hold_s is None else hold_s
        if seconds:
            self.holds.hold(node, seconds)

    def release(self, holder: Holder, hold_s: float | None = 0.0) -> None:
        """Release all segments and pages of a request; `hold_s`: see `leave`."""
        for segment in holder.segments:
            self.leave(segment, hold_s)
        sequence = holder.sequence
        self.allocator.release(sequence.pages)
        self.allocator.release(self.tree.make_room(holder.owner, 0))
        holder.read(())
        sequence.pages, sequence.start, sequence.num_computed, sequence.pending = array("i"), 0, 0, 0

    def num_own_tokens(self, holder: Holder) -> int:
        """Number of a request's tokens whose KV would not stay locked by another request or pin."""
        kept = sum(self._kept_pages(segment.node) for segment in holder.segments) * self.page_size
        return max(holder.num_present - kept, 0)

    def _kept_pages(self, node: Node | None) -> int:
        """Number of pages on the path to a node that stay locked if one lock of the node is undone."""
        while node is not None and node.refs == 1 and not node.pins:
            node = node.parent
        return sum(len(above.pages) for above in path(node))

    def flush(self) -> int:
        """Drop the unreferenced cached pages; returns their number."""
        pages = self.tree.flush()
        self.allocator.release(pages)
        return len(pages)

    def drop(self, node: Node) -> int:
        """Drop the unreferenced pages of a node and its subtree; returns their number."""
        pages = self.tree.drop(node)
        self.allocator.release(pages)
        return len(pages)

    def distrust(self, node: Node) -> None:
        """Drop a node and its subtree, whose KV may be damaged, from the tree and the tiers."""
        if self.on_distrust is not None:
            self.on_distrust(node)
        self.drop(node)

    def allocate(
        self, count: int, behind: array[int], owner: Namespace, cached: int | None = None
    ) -> array[int] | None:
        """Allocate pages, after evicting others if needed; None, with nothing changed, if memory does not suffice.

        Args:
            count: number of pages.
            behind: pages that the new pages should directly follow.
            owner: the namespace whose quota limits the new pages.
            cached: number of new pages that the tree will get; default: all.
        """
        if count > self.num_available:
            self.pins.expire()
            if count > self.num_available:
                return None
        self.allocator.release(self.tree.make_room(owner, count if cached is None else cached))
        if (short := count - self.allocator.num_free) > 0:
            self.allocator.release(self.tree.evict(short))
        return self.allocator.allocate(count, behind[-1] if behind else -1)

    def expire(self) -> None:
        """End the pins and holds whose time is over."""
        self.pins.expire()
        self.holds.expire()

    def check(self, live: Iterable[Holder]) -> None:
        """Raise AssertionError unless free + tree + private == all, and nothing idle is locked."""
        self.tree.check()
        self.holds.check()
        if self.near is not None:
            self.near.check()
        live = list(live)
        tree = [page for node in self.tree.nodes() for page in node.pages]
        private = [page for request in live for page in request.sequence.pages]
        segments = [segment for request in live for segment in request.segments] + self.held
        private += [page for segment in segments if segment.node is None for page in segment.pages]
        for request in live:
            # The sequence of a request may contain a page of the tree, if a segment of the request locks that page.
            locked = {page for segment in request.segments if segment.node for page in segment.pages}
            assert not set(tree) & (set(request.sequence.pages) - locked), "a page has two owners"
        self.allocator.check(tree + private)
        for segment in (segment for segment in segments if segment.node is not None):
            held = {page for node in path(segment.node) for page in node.pages}
            assert held.issuperset(segment.pages), "a segment reads pages that its node does not lock"
        if not any(segment.node for segment in segments):
            assert self.tree.num_locked_pages == self.tree.num_pinned_pages, "an idle node is locked"
