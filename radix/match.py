"""The result of a look-up in the tree."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from radix.node import Node


@dataclass(slots=True)
class Match:
    """The longest cached prefix of a key; valid until the tree changes.

    Attributes:
        pages: int32 ids of the whole pages that match.
        node: the node that holds the last of them; None when no page matches.
        node_pages: number of that node's pages that match.
        partial_page: a page whose first rows continue the match; -1 when there is none. Copy these rows, never write
            into the page. partial_rows: their number, less than a page.
        partial_node: the node that owns `partial_page`.
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    node: Node | None = None
    node_pages: int = 0
    partial_page: int = -1
    partial_rows: int = 0
    partial_node: Node | None = None
