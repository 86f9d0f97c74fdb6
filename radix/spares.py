"""Runs that are evicted before all others: attached runs that nobody needs, and paths that led only to such runs."""

from radix.eviction import Victim
from radix.namespace import Namespace
from radix.node import Node


class Spares:
    """The spare runs of a tree, the oldest first. A run that is used, locked or held meanwhile is spare no more."""

    def __init__(self) -> None:
        # Each run's last use when it became spare.
        self._used: dict[Node, int] = {}

    def add(self, node: Node) -> None:
        self._used[node] = node.last_use

    def pop(self, owner: Namespace | None = None) -> Victim | None:
        """The next victim, of an owner if one is given; None if there is none. The tree reports when it has left."""
        found, stale = None, []
        for node, used in self._used.items():
            if not node.is_free_leaf or node.last_use != used or node.held_until_s:
                stale.append(node)
            elif owner in (None, node.owner):
                found = node
                break
        for node in stale:
            del self._used[node]
        return None if found is None else (found, len(found.pages))

    def left(self, node: Node) -> bool:
        """Take note of a run that has left the tree; returns whether the path above it may now lead nowhere."""
        return self._used.pop(node, None) is not None or node.is_attached
