"""The radix tree over token sequences: match, insert, split, lock, evict. Pure data; no torch, no I/O, no clock."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from radix.node import TOKEN_BYTES, Node, common_tokens


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
    the pages that were inserted until `evict` or `flush` hands them back. Sequences of different namespaces never
    meet. Time is logical: every use is one tick.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []
        self._tick = 0
        self._serial = 0
        self.num_nodes = 0
        self.num_pages = 0
        self.num_locked_pages = 0
        self.num_evicted_pages = 0

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
        offset, page_bytes = 0, self._page_bytes
        while (child := node.children.get(key[offset : offset + page_bytes])) is not None:
            run = child.key
            if key.startswith(run, offset):
                found.pages.extend(child.pages)
                offset += len(run)
                node = found.node = child
                found.node_pages = len(child.pages)
                continue
            self._match_inside(found, key, offset, child)
            return found
        if offset < len(key) and node.children:
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
        """Stamp and lock exactly the matched pages; returns the node to `unlock` later.

        A run that matches in part is split here, so that its other pages stay evictable.
        """
        node = match.node
        if node is not None and match.node_pages < len(node.pages):
            node = self._split(node, match.node_pages)
        self.touch(node)
        self.lock(node)
        return node

    def touch(self, node: Node | None) -> None:
        """Stamp a use of the path that ends in `node`."""
        if node is not None:
            self._tick += 1
            node.last_use = self._tick
            self._enqueue(node)

    def lock(self, node: Node | None) -> None:
        """Keep the path that ends in `node` from eviction; climbs up to the first referenced ancestor."""
        while node is not None and node.parent is not None:
            node.refs += 1
            if node.refs > 1:
                return
            self.num_locked_pages += len(node.pages)
            node = node.parent

    def unlock(self, node: Node | None) -> None:
        """Undo one `lock` of the same node."""
        while node is not None and node.parent is not None:
            assert node.refs > 0, "unlock without lock"
            node.refs -= 1
            if node.refs:
                return
            self.num_locked_pages -= len(node.pages)
            self._enqueue(node)
            node = node.parent

    # -- writing ---------------------------------------------------------------------------------------------

    def insert(self, key: bytes, pages: array[int], namespace: str = "") -> tuple[Node | None, array[int]]:
        """Add the whole pages of `key`.

        Args:
            key: at least `len(pages)` pages of tokens; what is beyond is ignored.
            pages: page ids for the leading pages of `key`.
            namespace: the key's namespace.

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
                node = self._grow(node, key[offset:], pages[offset // self._page_bytes :])
                held.extend(node.pages)
                break
            whole = common_tokens(key, offset, child.key) // self.page_size
            node = child if whole == len(child.pages) else self._split(child, whole)
            held.extend(node.pages)
            offset += len(node.key)
        self.touch(node)
        return node, held

    def _grow(self, parent: Node, key: bytes, pages: array[int]) -> Node:
        leaf = Node(key, pages, parent, parent.namespace)
        parent.attach(key[: self._page_bytes], leaf)
        self.num_nodes += 1
        self.num_pages += len(pages)
        return leaf

    def _split(self, node: Node, whole: int) -> Node:
        """Cut a run after `whole` pages; the node itself becomes the lower part, so that locks on it stay good."""
        assert node.parent is not None
        cut = whole * self._page_bytes
        upper = Node(node.key[:cut], node.pages[:whole], node.parent, node.namespace)
        upper.refs = 1 if node.refs else 0
        upper.last_use = node.last_use
        node.parent.attach(upper.key[: self._page_bytes], upper)
        node.key, node.pages, node.parent = node.key[cut:], node.pages[whole:], upper
        upper.attach(node.key[: self._page_bytes], node)
        self.num_nodes += 1
        return upper

    # -- evicting --------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> array[int]:
        """Give back up to `num_pages` unreferenced pages, least recently used leaves first, each from its end."""
        freed = array("i")
        while len(freed) < num_pages and (node := self._victim()) is not None:
            want = min(num_pages - len(freed), len(node.pages))
            freed.extend(node.pages[len(node.pages) - want :])
            if want == len(node.pages):
                self._remove(node)
            else:
                node.pages = node.pages[:-want]
                node.key = node.key[: len(node.pages) * self._page_bytes]
                self._enqueue(node)
            self.num_pages -= want
        self.num_evicted_pages += len(freed)
        return freed

    def flush(self) -> array[int]:
        """Give back every unreferenced page."""
        return self.evict(self.num_pages)

    def _enqueue(self, node: Node) -> None:
        """Put a node into the victim order if it is an unreferenced leaf and not there already with this stamp."""
        if node.children or node.refs or node.parent is None or node.queued == node.last_use:
            return
        node.queued = node.last_use
        self._serial += 1
        heappush(self._heap, (node.last_use, self._serial, node))
        if len(self._heap) > 4 * self.num_nodes + 64:
            self._compact()

    def _compact(self) -> None:
        """Drop the entries that hold no more: each was pushed once, so this is O(1) a push."""
        kept = []
        for entry in self._heap:
            if _is_current(entry):
                kept.append(entry)
            elif entry[2].queued == entry[0]:
                entry[2].queued = -1
        heapify(kept)
        self._heap = kept

    def _victim(self) -> Node | None:
        """Pop the first entry that still holds; a node enters anew whenever it becomes an unreferenced leaf."""
        while self._heap:
            entry = heappop(self._heap)
            current = _is_current(entry)
            if entry[2].queued == entry[0]:
                entry[2].queued = -1
            if current:
                return entry[2]
        return None

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        parent.detach(node.key[: self._page_bytes])
        node.parent = None
        self.num_nodes -= 1
        parent.last_use = max(parent.last_use, node.last_use)
        self._enqueue(parent)
        if parent.parent is None and not parent.children:
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
        queued = {id(entry[2]) for entry in self._heap if _is_current(entry)}
        for n in nodes:
            assert n.parent is not None
            assert n.pages
            assert len(n.key) == len(n.pages) * self._page_bytes
            assert n.parent.children[n.key[: self._page_bytes]] is n
            assert n.order is None or list(n.order) == sorted(n.children)
            assert n.refs >= sum(1 for c in n.children.values() if c.refs)
            assert (id(n) in queued) == (not n.children and not n.refs), "victim order is wrong"


def _is_current(entry: tuple[int, int, Node]) -> bool:
    stamp, _, node = entry
    return node.parent is not None and not node.children and not node.refs and node.last_use == stamp
