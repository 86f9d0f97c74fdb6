"""Who owns which page: joins the tree, the allocator and the pool for the requests that use them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Mapping

from radix import EventLog, Match, Namespace, Node, Quotas, RadixTree, make_policy, path
from radix.node import TOKEN_BYTES
from runtime.config import CacheConfig
from runtime.kv.allocator import PageAllocator
from runtime.kv.pins import PinBoard
from runtime.kv.pool import KVPool
from runtime.request import Request


class PagedCache:
    """Gives requests their pages and keeps what they computed.

    Every page is free, held by the tree, or private to a live request. Pages move one way: a request fills private
    pages, `commit` hands the full ones to the tree, eviction frees them.
    """

    def __init__(
        self,
        pool: KVPool,
        config: CacheConfig,
        quotas: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`quotas`: pages by tenant, for those whose number differs from the configured one."""
        self.pool = pool
        self.page_size = pool.page_size
        self.enabled = config.prefix_cache
        self.allocator = PageAllocator(pool.num_pages)
        policy = make_policy(config.eviction_policy, pool.num_pages)
        self.events = EventLog(pool.page_size * TOKEN_BYTES) if config.kv_events else None
        limits = Quotas(quotas or {}, config.tenant_quota) if quotas or config.tenant_quota else None
        watchers = () if self.events is None else (self.events,)
        self.tree = RadixTree(pool.page_size, policy, clock, limits, watchers)
        self.pins = PinBoard(self.tree, int(config.pin_budget * pool.num_pages), clock)

    @property
    def num_available(self) -> int:
        """Pages that are free or could be evicted now."""
        return self.allocator.num_free + self.tree.num_evictable_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def match(self, request: Request) -> Match:
        """What the tree has of a request's tokens. The last token is never matched: its logits are wanted."""
        if not self.enabled:
            return Match()
        limit = len(request.tokens) - 1
        if request.wants_prompt_logprobs:
            limit = min(limit, max((request.prompt_logprobs_from or 0) - 1, 0))
        return self.tree.match(request.key(limit), request.namespace)

    def admit(self, request: Request, match: Match, headroom: int) -> bool:
        """Give a waiting request the matched pages and fresh ones for the rest of its tokens.

        Args:
            request: holds no pages.
            match: a fresh `match` of it.
            headroom: pages that must stay available afterwards, for those that decode.

        Returns:
            False, with nothing changed, if memory does not suffice.
        """
        node = self.tree.lock_match(match)
        need = self.pages_for(len(request.tokens)) - len(match.pages)
        fresh = None
        if need + headroom <= self.num_available:
            # The page to copy from must outlive the eviction that makes room for its copy; where nothing else can
            # be evicted it goes too, and its rows are computed again.
            self.tree.lock(match.partial_node)
            fresh = self.allocate(need, match.pages, request.namespace)
            self.tree.unlock(match.partial_node)
            rows = match.partial_rows if fresh is not None else 0
            if fresh is None:
                fresh = self.allocate(need, match.pages, request.namespace)
        if fresh is None:
            self.tree.unlock(node)
            return False
        self.tree.use(node)
        request.node, request.num_tree_pages = node, len(match.pages)
        request.pages = match.pages + fresh
        request.num_computed = len(match.pages) * self.page_size + rows
        if rows:
            self.pool.copy_rows(match.partial_page, fresh[0], rows)
        return True

    def grow(self, request: Request, ahead: int = 0) -> bool:
        """Make sure that the next token's KV has a place, and `ahead` more's; False if memory does not suffice."""
        if len(request.pages) * self.page_size > request.num_computed + ahead:
            return True
        fresh = self.allocate(1, request.pages, request.namespace)
        if fresh is None:
            return False
        request.pages.extend(fresh)
        return True

    def commit(self, request: Request, cost: float = 0.0) -> None:
        """Hand the full, computed pages of a request to the tree, which may know some of them already.

        `cost` is what computing them took, in seconds.
        """
        full = request.num_computed // self.page_size
        if not self.enabled or full <= request.num_tree_pages:
            return
        key = request.key(full * self.page_size)
        node, held = self.tree.insert(key, request.pages[:full], request.namespace, cost)
        twice = [mine for mine, theirs in zip(request.pages, held, strict=False) if mine != theirs]
        request.pages[:full] = held
        self.allocator.release(twice)
        self.tree.lock(node)
        self.tree.unlock(request.node)
        request.node, request.num_tree_pages = node, full

    def release(self, request: Request, keep: bool = True) -> None:
        """Take all pages from a request; with `keep`, what it computed stays cached."""
        if keep:
            self.commit(request)
        self.tree.touch(request.node)
        self.tree.unlock(request.node)
        self.allocator.release(request.pages[request.num_tree_pages :])
        self.allocator.release(self.tree.make_room(request.namespace, 0))
        request.pages, request.num_tree_pages, request.node = array("i"), 0, None
        request.num_computed = 0

    def num_own_tokens(self, request: Request) -> int:
        """Computed tokens of a request that no other request and no pin keeps."""
        shared = request.node
        while shared is not None and shared.refs == 1 and not shared.pins:
            shared = shared.parent
        kept = sum(len(node.pages) for node in path(shared)) * self.page_size
        return request.num_computed - min(kept, request.num_computed)

    def flush(self) -> int:
        """Drop all cached pages that no live request uses; returns how many."""
        pages = self.tree.flush()
        self.allocator.release(pages)
        return len(pages)

    def drop(self, node: Node) -> int:
        """Drop a node and what lies below it, but for what is in use; returns how many pages."""
        pages = self.tree.drop(node)
        self.allocator.release(pages)
        return len(pages)

    def allocate(
        self, count: int, behind: array[int], namespace: Namespace, cached: int | None = None
    ) -> array[int] | None:
        """Take free pages, evicting what must go for them; None, with nothing changed, if memory does not suffice.

        Args:
            count: number of pages.
            behind: pages that the new ones would best follow.
            namespace: whose quota they count against.
            cached: how many of them will be the tree's; default: all.
        """
        if count > self.num_available:
            return None
        self.allocator.release(self.tree.make_room(namespace, count if cached is None else cached))
        if (short := count - self.allocator.num_free) > 0:
            self.allocator.release(self.tree.evict(short))
        return self.allocator.allocate(count, behind[-1] if behind else -1)

    def check(self, live: Iterable[Request]) -> None:
        """Raise AssertionError unless free + tree + private == all, and nothing idle is locked."""
        self.tree.check()
        live = list(live)
        tree = [page for node in self.tree.nodes() for page in node.pages]
        private = [page for request in live for page in request.pages[request.num_tree_pages :]]
        owned = tree + private
        self.allocator.check(owned)
        owners = set(tree)
        for request in live:
            assert all(page in owners for page in request.pages[: request.num_tree_pages])
        if not any(request.node for request in live):
            assert self.tree.num_locked_pages == self.tree.num_pinned_pages, "an idle node is locked"
