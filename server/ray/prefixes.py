"""Choice of a replica by the prefixes that replicas hold. Pure: no Ray, no sockets, no clock."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)


class PrefixIndex(Generic[R]):
    """Blocks by their chained hashes, and the replicas that hold each."""

    def __init__(self) -> None:
        self._holders: dict[int, set[R]] = {}
        self._held: dict[R, set[int]] = {}

    def stored(self, replica: R, hashes: Iterable[int]) -> None:
        held = self._held.setdefault(replica, set())
        for value in hashes:
            held.add(value)
            self._holders.setdefault(value, set()).add(replica)

    def removed(self, replica: R, hashes: Iterable[int]) -> None:
        held = self._held.get(replica, set())
        for value in hashes:
            if value in held:
                held.discard(value)
                holders = self._holders[value]
                holders.discard(replica)
                if not holders:
                    del self._holders[value]

    def forget(self, replica: R) -> None:
        """A replica holds nothing, as far as anybody knows."""
        self.removed(replica, self.held(replica))
        self._held.pop(replica, None)

    def held(self, replica: R) -> frozenset[int]:
        return frozenset(self._held.get(replica, ()))

    def match(self, hashes: Sequence[int]) -> dict[R, int]:
        """Leading blocks of a prompt that each replica holds; replicas without any are left out."""
        found: dict[R, int] = {}
        left: set[R] | None = None
        for number, value in enumerate(hashes):
            holders = self._holders.get(value, set())
            here = holders if left is None else left & holders
            found.update(dict.fromkeys((left or set()) - here, number))
            if not here:
                return found
            left = here
        return found | dict.fromkeys(left or (), len(hashes))


class BoundedPrefix:
    """The cheapest replica: load counts, and a cached token counts against `weight` tokens of load.

    A replica may have `share` times the mean load, and `slack` more. Beyond that its prefixes count no more, so that a
    hot one cannot hold others up behind it: the replica that takes its overflow computes it once, and has it from then
    on. Where no replica within the bound has anything of a prompt, the power of two choices decides.

    Args:
        weight: more than 1 counts the memory and the time of later prompts that a prefix at two places costs.
        share: times the mean load of all replicas, at least 1.
        slack: load that is no matter, in tokens.
        chooser: draws the two of the power of two choices.
    """

    def __init__(self, weight: float = 8, share: float = 2, slack: float = 32768, chooser: random.Random | None = None):
        self._weight = weight
        self._share = share
        self._slack = slack
        self._random = chooser or random.Random()

    def rank(self, matches: Mapping[R, int], loads: Mapping[R, float]) -> list[R]:
        """Replicas in the order in which they should be asked.

        Args:
            matches: tokens of the prompt that replicas hold; those that hold none may be left out.
            loads: of all replicas, tokens that they have to compute yet.
        """
        bound = self._share * sum(loads.values()) / max(len(loads), 1) + self._slack
        fit = [replica for replica in loads if loads[replica] <= bound]
        self._random.shuffle(fit)  # most of the time several have nothing to do
        if any(matches.get(replica) for replica in fit):
            ranked = sorted(fit, key=lambda replica: loads[replica] - self._weight * matches.get(replica, 0))
        else:
            ranked = []
        two = self._random.sample(list(loads), min(2, len(loads)))
        return ranked + sorted((replica for replica in two if replica not in ranked), key=loads.__getitem__)
