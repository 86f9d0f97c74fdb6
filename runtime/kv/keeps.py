"""Prefixes that tenants keep in the cache for a time from their last use on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from radix import Match, Namespace, Node, RadixTree, path


@dataclass(slots=True, eq=False)
class Keep:
    """A kept prefix: it ends with `node`, and is let go at `expires_s` unless it is used before."""

    keeper: Namespace
    node: Node
    ttl_s: float
    expires_s: float


class Keeps:
    """The kept prefixes of all tenants, by tenant and node; they pin the paths to their nodes.

    A split leaves a node where it ends, so that a node stands for one prefix as long as it is kept.
    """

    def __init__(self, tree: RadixTree):
        self.tree = tree
        self.keeps: dict[tuple[Namespace, Node], Keep] = {}
        self._soonest_s = 0.0  # nothing expires before

    def add(self, match: Match, keeper: Namespace, ttl_s: float, now: float) -> None:
        """Keep matched pages; a prefix that is kept already is renewed, for the longer of both times."""
        node = self.tree.lock_match(match)
        assert node is not None
        keep = self.keeps.get((keeper, node))
        if keep is None:
            keep = self.keeps[keeper, node] = Keep(keeper, node, ttl_s, now)
            self.tree.pin(node)
        self.tree.unlock(node)
        keep.ttl_s = max(keep.ttl_s, ttl_s)
        self._soonest_s = min(self._soonest_s, now + ttl_s)
        self.renew(node, keeper, now)

    def renew(self, node: Node | None, keeper: Namespace, now: float) -> None:
        """Book a use of the prefix that ends with a node, and so of all shorter ones that the same tenant keeps."""
        for above in path(node) if self.keeps else ():
            if (keep := self.keeps.get((keeper, above))) is not None:
                keep.expires_s = now + keep.ttl_s

    def remove(self, keeps: Iterable[Keep]) -> None:
        for keep in list(keeps):
            del self.keeps[keep.keeper, keep.node]
            self.tree.unpin(keep.node)

    def expire(self, now: float) -> list[Node]:
        """Let go of what nobody has used in its time; the ends of these prefixes."""
        if not self.keeps or now < self._soonest_s:
            return []
        ended = [keep for keep in self.keeps.values() if keep.expires_s <= now]
        self.remove(ended)
        self._soonest_s = min((keep.expires_s for keep in self.keeps.values()), default=0.0)
        return [keep.node for keep in ended]

    def oldest(self) -> list[Keep]:
        """All keeps, the least recently used first."""
        return sorted(self.keeps.values(), key=lambda keep: keep.expires_s - keep.ttl_s)

    def nodes(self) -> dict[Namespace, set[Node]]:
        """The nodes that are kept, by tenant."""
        held: dict[Namespace, set[Node]] = defaultdict(set)
        for keep in self.keeps.values():
            held[keep.keeper].update(path(keep.node))
        return held
