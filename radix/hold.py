"""How long a new node is kept while anything else can go."""

from __future__ import annotations

# A node that is dearer than the mean is held longer in proportion, but never more than this many times.
_MOST = 10.0


class Hold:
    """A minimum hold time.

    Args:
        seconds: for every node, or with `by_cost` for one that costs as much as the mean of all so far.
        by_cost: hold in proportion to what the node took to compute.
    """

    def __init__(self, seconds: float = 0.0, by_cost: bool = False):
        self.seconds = seconds
        self.by_cost = by_cost
        self._cost = 0.0
        self._count = 0

    def until(self, now: float, cost: float) -> float:
        """When the hold of a node that comes now ends."""
        if not self.by_cost or not self.seconds:
            return now + self.seconds
        self._cost += cost
        self._count += 1
        weight = cost * self._count / self._cost if self._cost else 1.0
        return now + self.seconds * min(weight, _MOST)
