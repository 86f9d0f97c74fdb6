"""The radix tree over token sequences: match, insert, split, lock, pin, hold, evict. Pure data: no torch, no I/O."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from radix.events import EventLog
from radix.node import TOKEN_BYTES, Node, common_tokens
from radix.policy import LRU, Order, Policy


@dataclass(slots=True)
class Match:
    """The longest cached prefix of a key.

    Attributes:
        pages: int32 ids of the whole pages that match.
        node: the node in which the last of them lies; None when no page matches.
        node_pages: how many of that node's pages match.
        partial_page, partial_rows: a page that goes on like the key for some more rows (fewer than a page), and
            how many; -1 and 0 when there is none. Copy those rows, never write into the page.
        partial_node: the node that owns `partial_page`.
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    node: Node | None = None
    node_pages: int = 0
    partial_page: int = -1
    partial_rows: int = 0
    partial_node: Node | None = None


class RadixTree:
    """Maps token sequences to pages.

    Keys are int32 little-endian token ids as one `bytes`; a page id stands for `page_size` tokens. The tree owns
    the pages that were inserted until `evict` or `flush` hands them back. Sequences of different namespaces
    never meet.

    What is evicted is an unreferenced leaf, chosen by the policy among those whose hold is over; where only held ones
    are left, the hold that ends first yields. Recency is logical, one tick a use; holds read `clock`.

    Args:
        page_size: tokens in a page.
        policy: the order of victims; default: least recently used.
        clock: seconds, never going back. The tree has none of its own.
        hold: seconds for which a new node is held.
        log: is told of every page that comes or goes.

    Attributes:
        num_locked_pages: pages on the paths that are locked or pinned; num_pinned_pages: on those that are pinned.
        num_evicted_pages, num_broken_holds: counters.
    """

    def __init__(
        self,
        page_size: int,
        policy: Policy | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        hold: float = 0.0,
        log: EventLog | None = None,
    ):
        self._log = log
        self.page_size = page_size
        self.policy = policy or LRU()
        self.hold = hold
        self._clock = clock
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        self._held = Order()
        self._tick = 0
        self.num_nodes = 0
        self.num_pages = 0
        self.num_locked_pages = 0
        self.num_pinned_pages = 0
        self.num_evicted_pages = 0
        self.num_broken_holds = 0

    @property
    def num_evictable_pages(self) -> int:
        """Pages that `evict` could hand back now."""
        return self.num_pages - self.num_locked_pages

    # -- reading ---------------------------------------------------------------------------------------------

    def match(self, key: bytes, namespace: str = "") -> Match:
        """The longest cached prefix of `key`, exact to the token. Reads only; `acquire` makes use of it."""
        found = Match()
        node = self._roots.get(namespace)
        if node is None:
            return found
        offset, page_bytes, pages, last = 0, self._page_bytes, found.pages, None
        while (child := node.children.get(key[offset : offset + page_bytes])) is not None:
            run = child.key
            if not key.startswith(run, offset):
                break
            pages.extend(child.pages)
            offset += len(run)
            node = last = child
        if last is not None:
            found.node, found.node_pages = last, len(last.pages)
        if child is not None:
            self._match_inside(found, key, offset, child)
        elif offset < len(key) and node.children:
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

    # -- using -----------------------------------------------------------------------------------------------

    def acquire(self, match: Match) -> Node | None:
        """Book a use of exactly the matched pages and lock them; returns the node to `unlock` later.

        A run that matches in part is split here, so that its other pages stay evictable.
        """
        node = match.node
        if node is None:
            return None
        if match.node_pages < len(node.pages):
            node = self._split(node, match.node_pages)
        node.hits += 1
        self._use(node)
        self.lock(node)
        return node

    def _use(self, node: Node) -> None:
        self._tick += 1
        node.last_use = self._tick
        self.policy.used(node, self._tick)
        self._enqueue(node)

    def touch(self, node: Node | None) -> None:
        """Renew the recency of the path that ends in `node`, without counting a use."""
        if node is not None:
            self._tick += 1
            node.last_use = self._tick
            self._enqueue(node)

    def lock(self, node: Node | None) -> None:
        """Keep the path that ends in `node` from eviction; climbs up to the first referenced ancestor."""
        while node is not None and (parent := node.parent) is not None:
            node.refs += 1
            if node.refs > 1:
                return
            self.num_locked_pages += len(node.pages)
            node = parent

    def unlock(self, node: Node | None) -> None:
        """Undo one `lock` of the same node."""
        while node is not None and (parent := node.parent) is not None:
            assert node.refs > 0, "unlock without lock"
            node.refs -= 1
            if node.refs:
                return
            self.num_locked_pages -= len(node.pages)
            if not node.children:
                self._enqueue(node)
            node = parent

    def pin(self, node: Node) -> None:
        """Lock a path for as long as an operator wants; counted apart from the locks of live requests."""
        self.lock(node)
        above: Node | None = node
        while above is not None and above.parent is not None:
            above.pins += 1
            if above.pins > 1:
                return
            self.num_pinned_pages += len(above.pages)
            above = above.parent

    def unpin(self, node: Node) -> None:
        """Undo one `pin` of the same node."""
        above: Node | None = node
        while above is not None and above.parent is not None:
            assert above.pins > 0, "unpin without pin"
            above.pins -= 1
            if above.pins:
                break
            self.num_pinned_pages -= len(above.pages)
            above = above.parent
        self.unlock(node)

    def num_new_pinned_pages(self, match: Match) -> int:
        """Pages that a pin of a match would add to `num_pinned_pages`."""
        pages, node = match.node_pages, match.node
        while node is not None and node.parent is not None and not node.pins:
            if node is not match.node:
                pages += len(node.pages)
            node = node.parent
        return pages if match.node is not None and not match.node.pins else 0

    # -- writing ---------------------------------------------------------------------------------------------

    def insert(
        self, key: bytes, pages: array[int], namespace: str = "", cost: float = 0.0
    ) -> tuple[Node | None, array[int]]:
        """Add the whole pages of `key`.

        Args:
            key: at least `len(pages)` pages of tokens; what is beyond is ignored.
            pages: page ids for the leading pages of `key`.
            namespace: the key's namespace.
            cost: what computing those pages took that the tree does not have yet, for policies that weigh it.

        Returns:
            The node in which the last page lies (None without pages) and the page ids that the tree holds for the
            key. Where these differ from `pages`, the tree had that page before and the caller keeps its own.
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
                node = self._grow(node, key[offset:], pages[offset // self._page_bytes :], cost)
                held.extend(node.pages)
                break
            whole = common_tokens(key, offset, child.key) // self.page_size
            node = child if whole == len(child.pages) else self._split(child, whole)
            held.extend(node.pages)
            offset += len(node.key)
        else:
            self.touch(node)
        return node, held

    def _grow(self, parent: Node, key: bytes, pages: array[int], cost: float) -> Node:
        leaf = Node(key, pages, parent, parent.namespace)
        parent.attach(key[: self._page_bytes], leaf)
        leaf.cost = cost
        if self.hold:
            leaf.hold_until = self._clock() + self.hold
        self._use(leaf)
        self.num_nodes += 1
        self.num_pages += len(pages)
        if self._log is not None:
            self._log.stored(leaf)
        return leaf

    def _split(self, node: Node, whole: int) -> Node:
        """Cut a run after `whole` pages; the node itself becomes the lower part, so that locks on it stay good."""
        assert node.parent is not None
        cut = whole * self._page_bytes
        upper = Node(node.key[:cut], node.pages[:whole], node.parent, node.namespace)
        upper.refs, upper.pins = int(node.refs > 0), int(node.pins > 0)
        for name in ("last_use", "hits", "hold_until", "heat", "frequency"):
            setattr(upper, name, getattr(node, name))
        upper.cost = node.cost * whole / len(node.pages)
        node.cost -= upper.cost
        node.parent.attach(upper.key[: self._page_bytes], upper)
        node.key, node.pages, node.parent = node.key[cut:], node.pages[whole:], upper
        upper.attach(node.key[: self._page_bytes], node)
        self.num_nodes += 1
        self.policy.split(upper, node)
        if self._log is not None:
            self._log.split(upper, node)
        return upper

    # -- evicting --------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> array[int]:
        """Give back up to `num_pages` unreferenced pages, each victim's from its end."""
        freed = array("i")
        while len(freed) < num_pages and (node := self._victim()) is not None:
            self._trim(node, num_pages - len(freed), freed)
        return freed

    def flush(self) -> array[int]:
        """Give back every unreferenced page."""
        return self.evict(self.num_pages)

    def _trim(self, node: Node, want: int, freed: array[int]) -> None:
        want = min(want, len(node.pages))
        kept = len(node.pages) - want
        freed.extend(node.pages[kept:])
        if self._log is not None:
            self._log.removed(node, kept)
        if kept:
            node.cost *= kept / len(node.pages)
            node.pages = node.pages[:kept]
            node.key = node.key[: kept * self._page_bytes]
            self._enqueue(node)
        else:
            self._remove(node)
        self.num_pages -= want
        self.num_evicted_pages += want

    def _enqueue(self, node: Node) -> None:
        """Put a node into the victim order, or among the held ones, if it is an unreferenced leaf."""
        if node.is_free_leaf:
            if node.hold_until > self._clock():
                self._held.push(node.hold_until, node)
            else:
                self.policy.enter(node)

    def _victim(self) -> Node | None:
        now = self._clock()
        while (first := self._held.first()) is not None and first[0] <= now:
            self._held.pop()
            self.policy.enter(first[1])
        if (node := self.policy.pop()) is not None:
            return node
        if (node := self._held.pop()) is not None:
            self.num_broken_holds += 1
        return node

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        parent.detach(node.key[: self._page_bytes])
        node.parent = None
        self.num_nodes -= 1
        self.policy.evicted(node)
        if parent.parent is not None:
            self.policy.absorb(parent, node)
            self._enqueue(parent)
        elif not parent.children:
            del self._roots[parent.namespace]

    # -- looking ---------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise AssertionError if an invariant of the tree does not hold. Walks the whole tree."""
        nodes = list(self.nodes())
        assert self.num_nodes == len(nodes)
        assert self.num_pages == sum(len(n.pages) for n in nodes)
        assert self.num_locked_pages == sum(len(n.pages) for n in nodes if n.refs)
        pages = [page for n in nodes for page in n.pages]
        assert len(set(pages)) == len(pages), "a page stands in two nodes"
        assert self.num_pinned_pages == sum(len(n.pages) for n in nodes if n.pins)
        for n in nodes:
            assert n.parent is not None
            assert n.pages
            assert len(n.key) == len(n.pages) * self._page_bytes
            assert n.parent.children[n.key[: self._page_bytes]] is n
            assert n.order is None or list(n.order) == sorted(n.children)
            assert n.refs >= sum(1 for c in n.children.values() if c.refs)
            assert n.pins >= sum(1 for c in n.children.values() if c.pins)
            assert n.refs >= n.pins
