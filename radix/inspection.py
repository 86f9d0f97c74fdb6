"""Views of a tree for operators: a list of its nodes from the roots down, and an outline of a large tree."""

from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator
from heapq import heappop, heappush, nlargest
from itertools import islice

from radix.eviction import Outlook
from radix.namespace import Namespace
from radix.node import TOKEN_BYTES, Node
from radix.tree import RadixTree
from radix.views import Block, NodeView

_SLICE = 1024


def view(
    tree: RadixTree,
    wanted: Callable[[Namespace], bool] = lambda namespace: True,
    max_depth: int | None = None,
    skip: int = 0,
    limit: int = 256,
    preview_tokens: int = 0,
) -> list[NodeView]:
    """Nodes in breadth-first order, so that parents come first.

    Visits no more than `skip + limit` nodes. Each call is exact; if the tree changes between two calls, their nodes may
    overlap or leave nodes out.

    Args:
        tree: the tree.
        wanted: whether the nodes of a namespace are listed.
        max_depth: deepest level; None: all.
        skip: nodes to leave out at the start.
        limit: largest number of nodes.
        preview_tokens: number of leading tokens to show of each node.
    """
    now = tree.now()
    nodes = list(islice(_breadth_first(tree, wanted, max_depth), skip, skip + limit))
    locked = {node for node, _, _ in nodes if node.refs > node.pins}
    for node, _, _ in reversed(nodes):
        if node in locked and node.parent is not None:
            locked.add(node.parent)
    return [
        _view(node, depth, start, now, node in locked, tree.policy.outlook(node), preview_tokens)
        for node, depth, start in nodes
    ]


def _breadth_first(
    tree: RadixTree, wanted: Callable[[Namespace], bool], max_depth: int | None
) -> Iterator[tuple[Node, int, int]]:
    # Children are taken one by one: a root may have very many of them.
    queue = deque((root, 0, 0) for namespace, root in tree.roots() if wanted(namespace))
    while queue:
        parent, depth, start = queue.popleft()
        if depth == max_depth:
            return
        for child in parent.children.values():
            yield child, depth + 1, start
            queue.append((child, depth + 1, start + len(child.key) // TOKEN_BYTES))


def _view(
    node: Node, depth: int, start: int, now: float, locked: bool, outlook: Outlook | None, preview_tokens: int
) -> NodeView:
    parent = node.parent
    return NodeView(
        id=node.pages[0],
        parent=parent.pages[0] if parent is not None and depth > 1 else None,
        namespace=node.namespace,
        depth=depth,
        start=start,
        tokens=len(node.key) // TOKEN_BYTES,
        attached=node.num_attached,
        pages=len(node.pages),
        children=len(node.children),
        hits=node.hits,
        idle_s=max(now - node.used_s, 0.0),
        age_s=max(now - node.created_s, 0.0),
        cost_s=node.cost,
        locked=locked,
        pinned=node.pins > 0,
        held_s=max(node.held_until_s - now, 0.0),
        meta=_describe(node),
        outlook=outlook,
        preview=b"" if node.is_attached else node.key[: preview_tokens * TOKEN_BYTES],
    )


def _describe(node: Node) -> dict[str, object] | None:
    return None if node.meta is None else node.meta.describe()


def outline(
    tree: RadixTree,
    limit: int,
    preview_tokens: int = 0,
    wanted: Callable[[Namespace], bool] = lambda namespace: True,
) -> Generator[None, None, list[Block]]:
    """Walk the whole tree and return the `limit` blocks with the most tokens, parents first.

    The generator yields after every thousand nodes, and the tree may change meanwhile; such changes may or may not be
    counted. The parent of every block is included. A run that was inserted in chunks is one block.
    """
    walk = _Walk(tree, wanted)
    yield from walk.down()
    yield from walk.up()
    return walk.heaviest(limit, preview_tokens)


def slices(
    tree: RadixTree, wanted: Callable[[Namespace], bool] = lambda namespace: True
) -> Iterator[list[tuple[Node, int]]]:
    """All nodes but attached runs, with the number of tokens before each, parents first, a thousand at a time.

    The tree may change meanwhile.
    """
    waiting = [(root, 0) for namespace, root in tree.roots() if wanted(namespace)]
    found: list[tuple[Node, int]] = []
    while waiting:
        node, start = waiting.pop()
        waiting.extend((child, start + len(node.key) // TOKEN_BYTES) for child in node.children.values())
        if node.pages and not node.is_attached:  # not a root
            found.append((node, start))
        if len(found) == _SLICE or not waiting:
            yield found
            found = []


class _Walk:
    """Nodes level by level, so that parents come first and siblings are adjacent.

    Numbers are kept in arrays: a hundred thousand small objects would set off the garbage collector.
    """

    def __init__(self, tree: RadixTree, wanted: Callable[[Namespace], bool]):
        self._tree = tree
        self._nodes: list[Node] = [root for namespace, root in tree.roots() if wanted(namespace)]
        self._num_roots = len(self._nodes)
        self._parents = array("q", [-1] * self._num_roots)
        self._starts = array("q", [0] * self._num_roots)
        self._first_child = array("q")
        self._totals = array("q")
        self._used_s = array("d")
        self._locked = bytearray()
        self._counts = array("q")

    def down(self) -> Generator[None, None, None]:
        at = 0
        while at < len(self._nodes):
            node = self._nodes[at]
            tokens = len(node.key) // TOKEN_BYTES
            self._first_child.append(len(self._nodes))
            self._totals.append(tokens)
            self._used_s.append(node.used_s)
            self._locked.append(node.refs > node.pins)
            self._counts.append(at >= self._num_roots)
            children = node.children.values()
            self._nodes.extend(children)
            self._parents.extend([at] * len(children))
            self._starts.extend([self._starts[at] + tokens] * len(children))
            at += 1
            if at % _SLICE == 0:
                yield
        self._first_child.append(at)

    def up(self) -> Generator[None, None, None]:
        for at in range(len(self._nodes) - 1, self._num_roots - 1, -1):
            parent = self._parents[at]
            self._totals[parent] += self._totals[at]
            self._counts[parent] += self._counts[at]
            self._used_s[parent] = max(self._used_s[parent], self._used_s[at])
            # On a path with a pin and a lock, only the locked node itself has more refs than pins.
            self._locked[parent] |= self._locked[at]
            if at % _SLICE == 0:
                yield

    def heaviest(self, limit: int, preview_tokens: int) -> list[Block]:
        now = self._tree.now()
        shown: list[Block] = []
        waiting: list[tuple[int, int, int]] = []  # minus its tokens, the node's index, the parent's index in `shown`

        def offer(places: range, parent: int) -> None:
            for at in nlargest(limit, places, key=self._totals.__getitem__):
                heappush(waiting, (-self._totals[at], at, parent))

        offer(range(self._num_roots), -1)
        while waiting and len(shown) < limit:
            _, at, parent = heappop(waiting)
            chain = self._chain(at)
            offer(self._children(chain[-1]), len(shown))
            shown.append(self._block(chain, parent if parent >= 0 else None, now, preview_tokens))
        return shown

    def _children(self, at: int) -> range:
        return range(self._first_child[at], self._first_child[at + 1])

    def _chain(self, at: int) -> list[int]:
        """A node and the unbranched nodes below it that look the same, such as the chunks of one prefill."""
        chain = [at]
        while at >= self._num_roots and len(below := self._children(at)) == 1:
            node, child = self._nodes[at], self._nodes[below[0]]
            if (node.hits, node.pins > 0) != (child.hits, child.pins > 0) or node.meta is not child.meta:
                break
            at = below[0]
            chain.append(at)
        return chain

    def _block(self, chain: list[int], parent: int | None, now: float, preview_tokens: int) -> Block:
        at, last = chain[0], chain[-1]
        node, end, is_root = self._nodes[at], self._nodes[last], at < self._num_roots
        run = b"".join(self._nodes[one].key for one in chain)
        hits = sum(self._nodes[child].hits for child in self._children(at)) if is_root else node.hits
        return Block(
            id=-1 if is_root else node.pages[0],
            end=(-1 if is_root else end.pages[0], self._starts[last]),
            parent=parent,
            namespace=node.namespace,
            start=self._starts[at],
            tokens=len(run) // TOKEN_BYTES,
            attached=end.num_attached,
            chained=0 if is_root else len(chain),
            total=self._totals[at],
            nodes=self._counts[at],
            cost_s=sum(self._nodes[one].cost for one in chain),
            hits=hits,
            idle_s=max(now - self._used_s[at], 0.0),
            locked=bool(self._locked[at]),
            pinned=not is_root and node.pins > 0,
            held_s=max(node.held_until_s - now, 0.0),
            meta=_describe(node),
            outlook=None if is_root else self._tree.policy.outlook(end),
            preview=b"" if node.is_attached else run[: preview_tokens * TOKEN_BYTES],
        )
