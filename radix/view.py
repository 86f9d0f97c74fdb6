"""A tree as somebody looks at it: a page of its nodes, from the roots down."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from radix.namespace import Namespace
from radix.node import TOKEN_BYTES, Node
from radix.tree import RadixTree


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node.

    Attributes:
        id, parent: a node's first page id, which no other node has at that moment; parent None: below the root.
        namespace: whose it is.
        depth: 1 for a child of the root.
        start: tokens that stand before the run; tokens: in it.
        pages, children: how many.
        hits: uses after the first; idle_s, age_s: seconds since the last use, and since it came.
        cost_s: what computing it took.
        locked, pinned, held: whether live requests or pins keep it, pins do, or a hold.
        preview: int32 tokens at the run's start, as one bytes object.
    """

    id: int
    parent: int | None
    namespace: Namespace
    depth: int
    start: int
    tokens: int
    pages: int
    children: int
    hits: int
    idle_s: float
    age_s: float
    cost_s: float
    locked: bool
    pinned: bool
    held: bool
    preview: bytes


def view(
    tree: RadixTree,
    wanted: Callable[[Namespace], bool] = lambda namespace: True,
    max_depth: int | None = None,
    skip: int = 0,
    limit: int = 256,
    preview_tokens: int = 0,
) -> list[NodeView]:
    """Nodes in breadth-first order, so that parents come first.

    Touches no more than `skip + limit` nodes. A page is exact; the pages of a tree that changes between two calls may
    overlap or leave nodes out.

    Args:
        tree: the tree.
        wanted: whether the nodes of a namespace are listed.
        max_depth: deepest level; None: all.
        skip: nodes to leave out at the start.
        limit: most nodes.
        preview_tokens: how many of each run's first tokens are shown.
    """
    now = tree.now()
    nodes = islice(_breadth_first(tree, wanted, max_depth), skip, skip + limit)
    return [_view(node, depth, start, now, preview_tokens) for node, depth, start in nodes]


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


def _view(node: Node, depth: int, start: int, now: float, preview_tokens: int) -> NodeView:
    parent = node.parent
    return NodeView(
        id=node.pages[0],
        parent=parent.pages[0] if parent is not None and depth > 1 else None,
        namespace=node.namespace,
        depth=depth,
        start=start,
        tokens=len(node.key) // TOKEN_BYTES,
        pages=len(node.pages),
        children=len(node.children),
        hits=node.hits,
        idle_s=max(now - node.used_s, 0.0),
        age_s=max(now - node.created_s, 0.0),
        cost_s=node.cost,
        locked=node.refs > 0,
        pinned=node.pins > 0,
        held=node.hold_until > now,
        preview=node.key[: preview_tokens * TOKEN_BYTES],
    )
