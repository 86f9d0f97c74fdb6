"""What operators see of a tree: a node, and a block of an outline."""

from dataclasses import dataclass

from radix.eviction import Outlook
from radix.namespace import Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """A part of the tree.

    Attributes:
        start: number of tokens before the run; tokens: number of tokens in the run.
        attached: number of attached runs that begin where this run ends.
        hits: uses of paths through the run; idle_s: seconds since the last use.
        cost_s: seconds that it took to compute the run.
        locked, pinned: whether a live request protects the run, and whether a pin does. For a run with a pin, `locked`
            takes only the run itself into account and what lies below it in the same answer.
        held_s: seconds for which the run is still held; 0: it is not held.
        meta: `Meta.describe()` of the run's record, None without a record.
        outlook: the eviction policy's expectation, None if the policy has none.
        preview: int32 tokens at the run's start, as one bytes object.
    """

    id: int
    parent: int | None
    namespace: Namespace
    start: int
    tokens: int
    attached: int
    hits: int
    idle_s: float
    cost_s: float
    locked: bool
    pinned: bool
    held_s: float
    meta: dict[str, object] | None
    outlook: Outlook | None
    preview: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView(_Shown):
    """One node.

    Attributes:
        id: the node's first page id, unique at that moment; parent: the parent's id, None for a child of the root.
        depth: 1 for a child of the root.
        pages, children: number of pages and of children.
        age_s: seconds since the node was inserted.
    """

    depth: int
    pages: int
    children: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(_Shown):
    """A node, a chain of nodes without branches, or the root of a namespace, with sums over the nodes below it.

    Attributes:
        id: the first node's first page id; -1 for a root.
        end: the last node's first page id, and the number of tokens before that node.
        parent: the parent's index in the outline, None for a root.
        chained: number of nodes in the chain; 0 for a root, which has no tokens.
        total, nodes: number of tokens and of nodes in the block and everything below it.
        hits: of a root, the sum of its children's; idle_s: the shortest of the block and everything below it.
    """

    end: tuple[int, int]
    chained: int
    total: int
    nodes: int
