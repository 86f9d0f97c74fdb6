"""The radix tree over token sequences: match, insert, split, lock, pin, evict. Pure data: no torch, no I/O."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from radix.attached import num_before
from radix.events import Watcher
from radix.eviction import LRU, Policy, Victim
from radix.match import Match
from radix.namespace import Namespace
from radix.node import TOKEN_BYTES, Meta, Node, common_tokens, path
from radix.quotas import Quotas
from radix.spares import Spares
from radix.stats import Cause, Stats

# Attributes that both parts of a split run keep; the cost is divided.
_RECORD = ("last_use", "hits", "created_s", "used_s", "expired_s", "meta", "owner")
_PUBLIC = Namespace()


class RadixTree:
    """Maps token sequences to pages.

    Keys are int32 little-endian token ids as one `bytes`; a page id stands for `page_size` tokens. The tree owns
    inserted pages until `evict`, `make_room`, `drop` or `flush` returns them. Sequences of different namespaces share
    nothing.

    Victims are unreferenced leaves, in the policy's order. Recency is a logical clock, which ticks with every use.

    Args:
        page_size: tokens in a page.
        policy: the order of victims; default: least recently used.
        clock: seconds, never going back.
        quotas: limits of each tenant's pages; default: no limits.
        watchers: called for all pages that enter or leave.

    Attributes:
        num_locked_pages: pages on locked or pinned paths; num_pinned_pages: pages on pinned paths.
        spares: runs that are evicted first.
        stats: counters of evictions, and histograms of page lifetimes.
    """

    def __init__(
        self,
        page_size: int,
        policy: Policy | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        quotas: Quotas | None = None,
        watchers: Sequence[Watcher] = (),
    ):
        self.page_size = page_size
        self.policy = policy or LRU()
        self.quotas = quotas
        self.stats = Stats()
        self._watchers = tuple(watchers)
        self._clock = clock
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[Namespace, Node] = {}
        self._tick = 0
        self.spares = Spares()
        self.num_nodes = 0
        self.num_pages = 0
        self.num_locked_pages = 0
        self.num_pinned_pages = 0

    def watch(self, watcher: Watcher) -> None:
        """Add a watcher, which is called for pages that enter or leave from now on."""
        self._watchers += (watcher,)

    @property
    def num_evictable_pages(self) -> int:
        """Pages that `evict` could return now."""
        return self.num_pages - self.num_locked_pages

    # -- reading ---------------------------------------------------------------------------------------------

    def match(self, key: bytes, namespace: Namespace = _PUBLIC) -> Match:
        """The longest cached prefix of `key`, exact to the token. Changes nothing."""
        root = node = self._roots.get(namespace)
        if node is None:
            return Match()
        offset, end, page_bytes, pages = 0, len(key), self._page_bytes, array("i")
        child = None
        while offset < end:
            child = node.only or node.children.get(key[offset : offset + page_bytes])
            if child is None or not key.startswith(run := child.key, offset):
                break
            pages.extend(child.pages)
            offset += len(run)
            node = child
        found = Match(pages) if node is root else Match(pages, node, len(node.pages))
        if offset < end:
            if child is not None:
                self._match_inside(found, key, offset, child)
            elif self.page_size > 1 and node.children:
                child, rows = node.closest_child(key[offset : offset + page_bytes])
                if child is not None:
                    found.partial_page, found.partial_rows, found.partial_node = child.pages[0], rows, child
        return found

    def _match_inside(self, found: Match, key: bytes, offset: int, child: Node) -> None:
        tokens = common_tokens(key, offset, child.key)
        whole, rows = divmod(tokens, self.page_size)
        found.pages.extend(child.pages[:whole])
        if whole:
            found.node, found.node_pages = child, whole
        if rows:
            found.partial_page, found.partial_rows, found.partial_node = child.pages[whole], rows, child

    def root(self, namespace: Namespace) -> Node | None:
        """The root of a namespace; None if nothing of it is cached."""
        return self._roots.get(namespace)

    # -- using -----------------------------------------------------------------------------------------------

    def lock_match(self, match: Match) -> Node | None:
        """Lock exactly the matched pages; returns the node to `unlock` later, None if no page matched.

        A node that matches in part is split, so that its other pages stay evictable. Call `use` to count a hit.
        """
        node = match.node
        if node is not None:
            if match.node_pages < len(node.pages):
                node = self._split(node, match.node_pages)
            self.lock(node)
        return node

    def use(self, node: Node | None) -> None:
        """Count a use of the path that ends in `node`, as a hit of every node on it."""
        if node is not None:
            now = self._clock()
            self.stats.reuse_gap_s.add(now - node.used_s)
            for above in path(node):
                above.hits += 1
                above.used_s = now
            self._stamp(node, now)
            self.policy.used(node, self._tick)
            self.enqueue(node)

    def touch(self, node: Node | None) -> None:
        """Renew the recency of the path that ends in `node`, without counting a use."""
        if node is not None:
            self._stamp(node, self._clock())
            self.enqueue(node)

    def _stamp(self, node: Node, now: float) -> None:
        self._tick += 1
        node.last_use, node.used_s = self._tick, now

    def lock(self, node: Node | None) -> None:
        """Protect the path that ends in `node` from eviction; climbs up to the first referenced ancestor."""
        pages = 0
        while node is not None and not node.refs:
            node.refs = 1
            pages += len(node.pages)
            node = node.parent
        if node is not None:
            node.refs += 1
        self.num_locked_pages += pages

    def unlock(self, node: Node | None) -> None:
        """Undo one `lock` of the same node."""
        last, pages = node, 0
        while node is not None and node.refs == 1:
            node.refs = 0
            pages += len(node.pages)
            node = node.parent
        if node is not None:
            assert node.refs > 0, "unlock without lock"
            node.refs -= 1
        self.num_locked_pages -= pages
        if last is not None and not last.children:
            self.enqueue(last)

    def pin(self, node: Node) -> None:
        """Lock the path that ends in `node`; pins are counted apart from the locks of live requests."""
        self.lock(node)
        for above in path(node):
            above.pins += 1
            if above.pins > 1:
                break
            self.num_pinned_pages += len(above.pages)

    def unpin(self, node: Node, expired: bool = False) -> None:
        """Undo one `pin` of the same node; `expired`: whether the pin's time to live is over."""
        for above in path(node):
            assert above.pins > 0, "unpin without pin"
            above.pins -= 1
            if above.pins:
                break
            if expired:
                above.expired_s = self._clock()
            self.num_pinned_pages -= len(above.pages)
        self.unlock(node)

    def num_new_pinned_pages(self, match: Match) -> int:
        """Number of pages by which a pin of a match would raise `num_pinned_pages`."""
        if match.node is None or match.node.pins:
            return 0
        unpinned = takewhile(lambda above: not above.pins, path(match.node.parent))
        return match.node_pages + sum(len(above.pages) for above in unpinned)

    # -- writing ---------------------------------------------------------------------------------------------

    def insert(
        self,
        key: bytes,
        pages: array[int],
        namespace: Namespace = _PUBLIC,
        cost: float = 0.0,
        meta: Meta | None = None,
        owner: Namespace | None = None,
    ) -> tuple[Node | None, array[int]]:
        """Add the whole pages of `key`.

        Args:
            key: at least `len(pages)` pages of tokens; the rest is ignored. Its end may be an attached run.
            pages: page ids for the leading pages of `key`.
            namespace: the key's namespace.
            cost: cost of computing the pages that are new to the tree, for policies that weigh it.
            meta: a reuse strategy's record of the new pages, or of the attached run; splits keep it on both parts.
            owner: the namespace whose quota the new pages count against; default: the owner of `namespace`.

        Returns:
            The node that holds the last page (None without pages) and the page ids that the tree holds for the key.
            Where these differ from `pages`, the tree had the page already and the caller keeps its own.
        """
        end = len(pages) * self._page_bytes
        if not end:
            return None, array("i")
        held, key = array("i"), key[:end]
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(b"", array("i"), None, namespace)
        offset = 0
        while offset < end:
            child = node.children.get(key[offset : offset + self._page_bytes])
            if child is None:
                rest, new = key[offset:], pages[offset // self._page_bytes :]
                before = num_before(rest, self._page_bytes)
                if 0 < before < len(new):
                    node = self._grow(node, rest[: before * self._page_bytes], new[:before], 0.0, None, owner)
                    rest, new = rest[before * self._page_bytes :], new[before:]
                    held.extend(node.pages)
                node = self._grow(node, rest, new, cost, meta, owner)
                held.extend(node.pages)
                break
            whole = common_tokens(key, offset, child.key) // self.page_size
            node = child if whole == len(child.pages) else self._split(child, whole)
            held.extend(node.pages)
            offset += len(node.key)
        else:
            self.touch(node)
        return node, held

    def _grow(
        self, parent: Node, key: bytes, pages: array[int], cost: float, meta: Meta | None, owner: Namespace | None
    ) -> Node:
        leaf = Node(key, pages, parent, parent.namespace)
        parent.attach(key[: self._page_bytes], leaf)
        leaf.cost, leaf.meta = cost, meta
        leaf.created_s = now = self._clock()
        if self.quotas is not None:
            leaf.owner = owner or leaf.namespace.owner
            self.quotas.add(leaf.owner, len(pages))
        self._stamp(leaf, now)
        self.policy.used(leaf, self._tick)
        self.enqueue(leaf)
        self.num_nodes += 1
        self.num_pages += len(pages)
        for watcher in self._watchers:
            watcher.stored(leaf)
        return leaf

    def _split(self, node: Node, whole: int) -> Node:
        """Split a node after `whole` pages. The node itself becomes the lower part, so that its locks stay valid."""
        assert node.parent is not None
        cut = whole * self._page_bytes
        upper = Node(node.key[:cut], node.pages[:whole], node.parent, node.namespace)
        upper.refs, upper.pins = int(node.refs > 0), int(node.pins > 0)
        for name in _RECORD:
            setattr(upper, name, getattr(node, name))
        if node.hashes is not None:
            upper.hashes, node.hashes = node.hashes[:whole], node.hashes[whole:]
        upper.cost = node.cost * whole / len(node.pages)
        node.cost -= upper.cost
        node.parent.attach(upper.key[: self._page_bytes], upper)
        node.key, node.pages, node.parent = node.key[cut:], node.pages[whole:], upper
        upper.attach(node.key[: self._page_bytes], node)
        self.num_nodes += 1
        self.policy.split(upper, node)
        return upper

    # -- evicting --------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> array[int]:
        """Evict up to `num_pages` unreferenced pages, from the end of each victim; returns their ids."""
        return self._evict(num_pages, "room", lambda: self.spares.pop() or self.policy.pop())

    def flush(self) -> array[int]:
        """Remove every unreferenced page; returns their ids."""
        tops = [child for root in self._roots.values() for child in root.children.values()]
        return self.drop(*tops)

    def drop(self, *nodes: Node) -> array[int]:
        """Remove every unreferenced page of `nodes` and of the nodes below them; returns their ids."""
        freed, now = array("i"), self._clock()
        below = list(nodes)
        for above in below:
            below.extend(above.children.values())
        for last in reversed(below):
            if last.is_free_leaf:
                self._trim(last, len(last.pages), freed, now, "flush")
        return freed

    def make_room(self, owner: Namespace, num_pages: int) -> array[int]:
        """Evict pages of an owner until `num_pages` more fit into its quota, or none can go; returns their ids."""
        quotas = self.quotas
        if quotas is None or not (over := quotas.over(owner, num_pages)):
            return array("i")
        return self._evict(over, "quota", lambda: self.spares.pop(owner.owner) or quotas.pop(owner))

    def _evict(self, num_pages: int, cause: Cause, pop: Callable[[], Victim | None]) -> array[int]:
        freed, now = array("i"), self._clock()
        while len(freed) < num_pages and (victim := pop()) is not None:
            node, most = victim
            want = len(node.pages) if node.is_attached else min(most, num_pages - len(freed))
            self._trim(node, want, freed, now, cause)
        return freed

    def _trim(self, node: Node, want: int, freed: array[int], now: float, cause: Cause) -> None:
        kept = len(node.pages) - want
        for watcher in self._watchers:
            watcher.leaving(node, kept, cause)
        self.policy.leaving(node, kept)
        freed.extend(node.pages[kept:])
        self._book_eviction(node, want, now, cause)
        if kept:
            node.cost *= kept / len(node.pages)
            node.pages = node.pages[:kept]
            node.hashes = node.hashes and node.hashes[:kept]
            node.key = node.key[: kept * self._page_bytes]
            self.enqueue(node)
        else:
            self._remove(node)

    def _book_eviction(self, node: Node, pages: int, now: float, cause: Cause) -> None:
        self.num_pages -= pages
        self.stats.evicted[cause] += pages
        self.stats.idle_s.add(now - node.used_s, pages)
        self.stats.lifetime_s.add(now - node.created_s, pages)
        if self.quotas is not None:
            self.quotas.add(node.owner, -pages)

    def enqueue(self, node: Node) -> None:
        """Enter a node into the victim orders, if it is an unreferenced leaf."""
        if node.is_free_leaf:
            self.policy.enter(node)
            if self.quotas is not None:
                self.quotas.enter(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        parent.detach(node.key[: self._page_bytes])
        leads_nowhere = self.spares.left(node)
        node.parent, node.key = None, b""  # victim orders keep the node for a while, but none of its tokens
        self.num_nodes -= 1
        if parent.parent is not None:
            self.policy.absorb(parent, node)
            self.enqueue(parent)
            if leads_nowhere and parent.is_free_leaf:
                self.spares.add(parent)
        elif not parent.children:
            del self._roots[parent.namespace]

    # -- inspection ------------------------------------------------------------------------------------------

    def now(self) -> float:
        """The tree's clock, in seconds."""
        return self._clock()

    def roots(self) -> Iterator[tuple[Namespace, Node]]:
        """The namespaces that have nodes, with their roots."""
        yield from self._roots.items()

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise AssertionError if an invariant of the tree is broken. Walks the whole tree."""
        from radix.check import check

        check(self)
