"""Pins that nobody asked for: the prefixes that are hit most."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import nlargest

from radix import Node
from runtime.kv.pins import Pin, PinBoard

_HALF_LIFE_S = 600.0
# Hits between two looks at the order, and hits (decayed) that a prefix must have: one may be chance.
_EVERY = 32
_LEAST = 2.0
# Prefixes that are counted, for each that is pinned.
_CANDIDATES = 64


class AutoPins:
    """Pins the top `count` prefixes by hits, where a hit counts half as much ten minutes later.

    They are within the board's budget, give way to an operator's pin, and are the first to yield to a request.
    """

    def __init__(self, board: PinBoard, count: int, clock: Callable[[], float]):
        self._board = board
        self._count = count
        self._clock = clock
        # log2 of the decayed count, grown by the time since the start: comparable without a sweep.
        self._heat: dict[Node, float] = {}
        self._notes = 0

    def note(self, node: Node) -> None:
        """A request has hit the prefix that ends in `node`."""
        present = self._clock() / _HALF_LIFE_S
        before = self._heat.get(node)
        self._heat[node] = present if before is None else present + math.log2(1 + 2 ** (before - present))
        self._notes += 1
        if self._notes % _EVERY == 0:
            self._refresh(present)

    def _refresh(self, present: float) -> None:
        most = _CANDIDATES * self._count
        alive = {node: heat for node, heat in self._heat.items() if node.parent is not None}
        self._heat = dict(nlargest(most, alive.items(), key=lambda item: item[1])) if len(alive) > most else alive
        hot = (item for item in self._heat.items() if item[1] - present >= math.log2(_LEAST))
        top = [node for node, _ in nlargest(self._count, hot, key=lambda item: item[1])]
        pinned: dict[Node, Pin] = {pin.node: pin for pin in self._board.pins.values() if pin.auto}
        for node, pin in pinned.items():
            if node not in top:
                self._board.unpin(pin.id)
        for node in top:
            if node not in pinned:
                self._board.pin_auto(node)
