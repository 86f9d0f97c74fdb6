"""Eviction by foresight: the leaf that promises the fewest hits goes first."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radix.eviction import Outlook, Policy, Victim
from radix.node import Node
from radix.returns import BUCKETS, EDGES, KINDS, Life, Returns, bucket, describe

# Leaves to compare for one victim.
_SAMPLE = 64
# A node with more branches is a shared prefix; its uses do not predict which branch returns.
_FEW = 3
# The policy learns whenever the number of uses has grown by a 64th, but after at least 32 and at most 1,024 uses.
_LEARN_GROWTH, _LEARN_LEAST, _LEARN_MOST = 64, 32, 1024
_HALVE_EVERY = 4096
# Evicted nodes to remember beyond the number of pages: a loop over long prompts is longer than a small pool.
_MORE_GHOSTS = 4096
# If at least this share of returns reuses a prompt's last page, that page is not evicted before the others.
_OFTEN = 0.9


@dataclass(slots=True, eq=False)
class _Record:
    """The policy's state of a node.

    Attributes:
        life: the current wait of the node's conversation; all nodes of a conversation share it.
        branches: number of children so far.
        is_settled: whether the prompt's last page has been evicted, or continued by a child.
        following: fingerprint of the next page, once evicted or split off, to compare with a new child; None: unused.
        place: index in `_Leaves`; -1: not there.
    """

    life: Life
    branches: int = 0
    is_settled: bool = False
    following: int | None = None
    place: int = -1


class Foresight(Policy):
    """Learns how soon sequences return, also after their eviction, and evicts the leaf with the lowest promise.

    Chats rarely return at once; most return after a while, then fewer and fewer. For each kind of leaf
    (`radix.returns`), the promise at an age is a Gittins index: expected hits per page and time. An older leaf that is
    due to return outranks a new leaf that may never return. Until something has returned, the order is LRU.

    Args:
        capacity: number of pages in the pool; as many evicted nodes and 4,096 more are remembered, each as a hash.
    """

    def __init__(self, capacity: int):
        self._most_ghosts = capacity + _MORE_GHOSTS
        self._returns = Returns()
        self._ghosts: OrderedDict[int, Life] = OrderedDict()
        self._leaves = _Leaves()
        self._now = self._uses = 0
        self._learn_at = _LEARN_LEAST
        # Returns that reused the previous prompt's last page, and returns that could have.
        self._used_last = self._could_use_last = 5.0
        self._reckon()

    # -- what the tree reports -------------------------------------------------------------------------------

    def used(self, node: Node, tick: int) -> None:
        host = _host(node)
        if host is not node and node.record is None:
            node.record = _Record(host.record.life, is_settled=True)
            return
        node = host
        if node.record is None:
            node.record = _Record(self._first_life(node, tick))
        else:
            self._return(node.record, tick)
        self._uses += 1
        if self._uses % _HALVE_EVERY == 0:
            self._returns.halve()
            self._used_last, self._could_use_last = self._used_last / 2, self._could_use_last / 2
        if self._uses >= self._learn_at:
            self._learn_at += min(max(self._uses // _LEARN_GROWTH, _LEARN_LEAST), _LEARN_MOST)
            self._returns.learn(tick)
            self._reckon()

    def _reckon(self) -> None:
        """Compute promises by kind and age. The table's second half is for leaves that are not settled."""
        promises = self._returns.promises()
        share = self._used_last / self._could_use_last
        self._one_at_first = share < _OFTEN
        self._promises = np.concatenate((promises, promises * share)).ravel()

    def _first_life(self, leaf: Node, tick: int) -> Life:
        """The Life of a new leaf: it was evicted before and returns, continues its parent, or is a new sequence."""
        mark = _fingerprint(leaf, 0)
        ghost = self._ghosts.pop(mark, None)
        above: _Record | None = leaf.parent.record if leaf.parent is not None else None
        if above is not None:
            self._grow(above, mark)
        if ghost is not None and not ghost.is_over:
            self._returns.end(ghost, tick)
            return self._returns.begin(tick, *ghost.next_turn(tick))
        if above is not None and above.branches <= _FEW:
            if not above.life.is_over:
                self._returns.cancel(above.life)
            above.life = self._returns.begin(tick, above.life.turn, above.life.gap)
            return above.life
        return self._returns.begin(tick, 1, 0)

    def _grow(self, parent: _Record, mark: int) -> None:
        self._leaves.remove(parent)
        if parent.following is not None:
            self._used_last += parent.following == mark
            self._could_use_last += 1
        parent.branches, parent.is_settled, parent.following = parent.branches + 1, True, None

    def _return(self, record: _Record, tick: int) -> None:
        life = record.life
        if not life.is_over:
            self._returns.end(life, tick)
            if not record.is_settled:
                self._used_last, self._could_use_last = self._used_last + 1, self._could_use_last + 1
        record.life = self._returns.begin(tick, *life.next_turn(tick), shared=record.branches > _FEW)

    def enter(self, node: Node) -> None:
        self._now = max(self._now, node.last_use)
        node.record.life = _host(node).record.life
        self._leaves.put(node, _row(node))

    def split(self, upper: Node, lower: Node) -> None:
        """Both parts share one Life. A split of an unsettled prompt shows that its last page was not reused."""
        following = None if lower.record.is_settled else _fingerprint(lower, 0)
        upper.record = _Record(lower.record.life, 1, True, following)

    def leaving(self, node: Node, kept_pages: int) -> None:
        """Remember the fingerprint of a node that leaves, or of a prompt's last page if only this page leaves."""
        record: _Record = node.record
        if kept_pages:
            is_last = not record.is_settled and kept_pages == len(node.pages) - 1
            record.following = _fingerprint(node, kept_pages) if is_last else None
            record.is_settled = True
            return
        self._leaves.remove(record)
        if _host(node) is not node:
            return
        mark = _fingerprint(node, 0)
        self._ghosts[mark] = record.life
        self._ghosts.move_to_end(mark)
        if len(self._ghosts) > self._most_ghosts:
            self._ghosts.popitem(last=False)

    def absorb(self, parent: Node, child: Node) -> None:
        """A child's newer Life becomes its parent's, unless the parent is a shared prefix."""
        super().absorb(parent, child)
        ours, theirs = parent.record, child.record
        if ours.branches <= _FEW and theirs.life.tick > ours.life.tick:
            ours.life = theirs.life

    # -- victims ---------------------------------------------------------------------------------------------

    def pop(self) -> Victim | None:
        while (node := self._leaves.least(self._promises, self._now)) is not None:
            self._leaves.remove(node.record)
            if node.is_free_leaf:
                return node, 1 if self._one_at_first and not node.record.is_settled else len(node.pages)
        return None

    def outlook(self, node: Node) -> Outlook:
        record, age = node.record, max(self._now - node.last_use, 0)
        promise = self._promises[_row(node) + bucket(age)]
        return Outlook(describe(record.life.kind), age, float(promise))


def _host(node: Node) -> Node:
    """The node whose uses are those of `node`: of an attached run, the end of its prefix."""
    above = node.parent
    return above if node.is_attached and above is not None and above.record is not None else node


def _row(node: Node) -> int:
    """Index of a leaf's first promise in the flat table."""
    return (node.record.life.kind + (0 if node.record.is_settled else KINDS)) * BUCKETS


def _fingerprint(node: Node, at: int) -> int:
    """A hash of page `at` of a node and of the page before it. Splits and trims do not change it."""
    size = len(node.key) // len(node.pages)
    assert node.parent is not None
    before = node.key[(at - 1) * size : at * size] if at else node.parent.key[-size:]
    return hash((node.namespace, before, node.key[at * size : (at + 1) * size]))


class _Leaves:
    """The evictable leaves, in parallel arrays: node, last use, and row in the table of promises."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._ticks = np.zeros(_SAMPLE, dtype=np.int64)
        self._rows = np.zeros(_SAMPLE, dtype=np.int64)
        self._turn = 0

    def put(self, node: Node, row: int) -> None:
        """Add or update a leaf."""
        if node.record.place < 0:
            node.record.place = len(self._nodes)
            self._nodes.append(node)
            if len(self._nodes) > len(self._ticks):
                self._ticks, self._rows = (np.concatenate((old, old)) for old in (self._ticks, self._rows))
        self._ticks[node.record.place], self._rows[node.record.place] = node.last_use, row

    def remove(self, record: _Record) -> None:
        """Remove a leaf if it is there. The last leaf moves to its index."""
        at, record.place = record.place, -1
        if at >= 0:
            last = self._nodes.pop()
            if at < len(self._nodes):
                self._nodes[at], last.record.place = last, at
                self._ticks[at], self._rows[at] = self._ticks[len(self._nodes)], self._rows[len(self._nodes)]

    def least(self, table: NDArray[np.float64], now: int) -> Node | None:
        """The leaf with the lowest promise among a sample at an even stride; the older of two equals; None if empty."""
        if not self._nodes:
            return None
        stride = max(len(self._nodes) // _SAMPLE, 1)
        self._turn += 1
        some = slice(self._turn % stride, len(self._nodes), stride)
        ages = now - self._ticks[some]
        buckets = np.minimum(np.searchsorted(EDGES, ages, side="right") - 1, BUCKETS - 1)
        promises = table[self._rows[some] + buckets] / (1 + 1e-6 * ages)
        return self._nodes[some.start + stride * int(promises.argmin())]
