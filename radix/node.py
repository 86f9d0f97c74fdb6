"""A node of the tree: a run of whole pages."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, Protocol

from sortedcontainers import SortedList

from radix.namespace import Namespace

TOKEN_BYTES = 4
# Tokens that pad pages: -1, and that of attached runs (`radix.attached`), int32.
LEAST_PAD = -2
ATTACHED = LEAST_PAD.to_bytes(TOKEN_BYTES, "little", signed=True)

# Below this many children a scan for the best partial page is cheaper than keeping them sorted.
_SORT_FROM = 9


def num_unpadded(tokens: array[int]) -> int:
    """Number of tokens, int32, that pad no page."""
    return sum(not LEAST_PAD <= token < 0 for token in tokens)


def has_names(tokens: bytes) -> bool:
    """Whether some of the int32 tokens are no ids but names of content, as of an image: those below the pads."""
    return min(array("i", tokens), default=0) < LEAST_PAD


class Meta(Protocol):
    """A reuse strategy's record of a run's KV, which the tree carries and shows to operators."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the whole entry to which the run belongs."""

    def describe(self) -> dict[str, object]:
        """The record as values that JSON can encode."""


class Node:
    """A run of whole pages, with its locks, counts and records.

    Attributes:
        key: the run's tokens, int32 little-endian, as one bytes object, which is fast to compare and to hash.
        pages: int32 page ids, one for each page of the run.
        hashes: uint64, one for each page; None until `node_hashes` computes them.
        children: by the bytes of their first page.
        is_attached: whether the run is an attached one.
        num_attached: number of children that are attached runs.
        only: the child if there is exactly one, else None; in a chain it spares a slice and a hash per node.
        refs: number of locks of this node, plus number of children with nonzero `refs`. So a node with a referenced
            descendant is referenced, and a lock need not climb beyond the first referenced ancestor.
        pins: like `refs`, but counts pins only.
        last_use: logical time of the last use. Only the deepest node of a used path is stamped; a parent takes over the
            time of its children when they leave, which results in the same order.
        hits: uses that ran through the node after it was inserted.
        created_s, used_s: the tree's clock when the node was inserted, and at its last use.
        expired_s: the tree's clock when a pin or a hold of the node last expired; negative: none did.
        held_until_s: the tree's clock when the node's hold ends; 0: the node is not held.
        slide_s: seconds for which each use holds the node again; 0: its hold does not slide.
        cost: cost of computing the run, in any unit as long as it is the same for all nodes.
        record: state of the eviction policy.
        queued, tenant_queued: serial numbers of the node's latest entries in the victim orders of tree and tenant.
        owner: the namespace whose quota the pages count against; set only in trees with quotas.
        meta: record of the reuse strategy that inserted the run; None: the KV depends on nothing but the tokens.
    """

    __slots__ = (
        "children", "cost", "created_s", "expired_s", "hashes", "held_until_s", "hits", "is_attached",
        "key", "last_use", "meta", "namespace", "num_attached", "only", "order", "owner", "pages", "parent", "pins",
        "queued", "record", "refs", "slide_s", "tenant_queued", "used_s",
    )  # fmt: skip

    def __init__(self, key: bytes, pages: array[int], parent: Node | None, namespace: Namespace):
        self.key = key
        self.pages = pages
        self.hashes: array[int] | None = None
        self.parent = parent
        self.namespace = self.owner = namespace
        self.children: dict[bytes, Node] = {}
        self.only: Node | None = None
        self.is_attached = key.endswith(ATTACHED)
        self.num_attached = 0
        self.order: SortedList | None = None
        self.refs = self.pins = self.hits = 0
        self.last_use = self.queued = self.tenant_queued = 0
        self.cost = self.created_s = self.used_s = self.held_until_s = self.slide_s = 0.0
        self.expired_s = -1.0
        self.meta: Meta | None = None
        self.record: Any = None

    @property
    def is_free_leaf(self) -> bool:
        """Whether the node is in the tree and nothing depends on it."""
        return not self.children and not self.refs and self.parent is not None

    def attach(self, first_page: bytes, child: Node) -> None:
        """Add a child, or replace the one with the same first page."""
        if self.order is not None and first_page not in self.children:
            self.order.add(first_page)
        self.num_attached += child.is_attached and first_page not in self.children
        self.children[first_page] = child
        self.only = child if len(self.children) == 1 else None

    def detach(self, first_page: bytes) -> None:
        self.num_attached -= self.children.pop(first_page).is_attached
        self.only = next(iter(self.children.values())) if len(self.children) == 1 else None
        if self.order is not None:
            self.order.remove(first_page)

    def closest_child(self, wanted: bytes) -> tuple[Node | None, int]:
        """The child whose first page shares the longest run of tokens with `wanted`, and that run's length.

        Among the sorted children, that child is a neighbour of `wanted`.
        """
        if self.order is None and len(self.children) >= _SORT_FROM:
            self.order = SortedList(self.children)
        if self.order is None:
            candidates = list(self.children)
        else:
            at = self.order.bisect_left(wanted)
            candidates = list(self.order.islice(max(at - 1, 0), at + 1))
        best, best_tokens = None, 0
        for first_page in candidates:
            tokens = common_tokens(wanted, 0, first_page)
            if tokens > best_tokens or (tokens == best_tokens and best is not None and best.is_attached):
                best, best_tokens = self.children[first_page], tokens
        return best, best_tokens


def path(node: Node | None) -> Iterator[Node]:
    """A node and its ancestors, without the root."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def common_tokens(key: bytes, offset: int, run: bytes) -> int:
    """Number of leading tokens of `run` that equal those of `key` from byte `offset` on."""
    # Bisection with few, long comparisons, which run at C speed.
    low, high = 0, min(len(run), len(key) - offset) // TOKEN_BYTES
    if key.startswith(run[: high * TOKEN_BYTES], offset):
        return high
    if key[offset : offset + TOKEN_BYTES] != run[:TOKEN_BYTES]:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        if (
            key[offset + low * TOKEN_BYTES : offset + middle * TOKEN_BYTES]
            == run[low * TOKEN_BYTES : middle * TOKEN_BYTES]
        ):
            low = middle
        else:
            high = middle
    return low
