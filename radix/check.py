"""The invariants of a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix.node import TOKEN_BYTES

if TYPE_CHECKING:
    from radix.tree import RadixTree


def check(tree: RadixTree) -> None:
    """See `RadixTree.check`."""
    page_bytes = tree.page_size * TOKEN_BYTES
    nodes = list(tree.nodes())
    assert tree.num_nodes == len(nodes)
    assert tree.num_pages == sum(len(n.pages) for n in nodes)
    assert tree.num_locked_pages == sum(len(n.pages) for n in nodes if n.refs)
    pages = [page for n in nodes for page in n.pages]
    assert len(set(pages)) == len(pages), "a page is in two nodes"
    assert tree.num_pinned_pages == sum(len(n.pages) for n in nodes if n.pins)
    for n in nodes:
        assert n.parent is not None
        assert n.pages
        assert len(n.key) == len(n.pages) * page_bytes
        assert n.parent.children[n.key[:page_bytes]] is n
        assert not (n.is_attached and n.children)
        assert n.num_attached == sum(child.is_attached for child in n.children.values())
        assert n.order is None or list(n.order) == sorted(n.children)
        assert n.refs >= sum(1 for c in n.children.values() if c.refs)
        assert n.pins >= sum(1 for c in n.children.values() if c.pins)
        assert n.refs >= n.pins
