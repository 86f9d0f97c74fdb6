"""Choice of a replica by prefixes, load and past work. Pure: no Ray, no sockets, no clock."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from server.ray.prefixes import PrefixIndex, R


@dataclass(frozen=True, slots=True)
class _Call:
    hashes: Sequence[int]
    tokens: int  # that it makes its replica compute


class Placement(Generic[R]):
    """The cheapest replica for a prompt.

    A replica costs the tokens that calls under way make it compute, and a part of what it had to compute more than
    the mean of all. Each token of the prompt that it holds, or will hold after a call under way, counts `weight`
    tokens against that. So nobody waits behind a hot prefix for more than `weight` times what it saves there: the
    replica that takes its overflow computes it once, and has it from then on.

    Args:
        block_tokens: tokens of a block.
        weight: more than 1 counts the memory and the time of later prompts that a prefix at two places costs.
        balance: tokens of load that a token of work above the mean counts for.
        chooser: draws among equal ones.

    Attributes:
        index: the blocks that replicas hold, to be told of their events.
    """

    def __init__(
        self, block_tokens: int, weight: float = 16, balance: float = 0.1, chooser: random.Random | None = None
    ):
        self.index: PrefixIndex[R] = PrefixIndex()
        self._block_tokens = block_tokens
        self._weight = weight
        self._balance = balance
        self._random = chooser or random.Random()
        self._calls: dict[R, dict[str, _Call]] = {}
        self._work: dict[R, float] = {}

    def join(self, replica: R) -> None:
        """A new replica, which begins with the mean of the others' work: it need not catch up with their past."""
        self._calls[replica] = {}
        self._work[replica] = self._mean_work()

    def leave(self, replica: R) -> None:
        """A replica has left, or died, with all that it held."""
        self._calls.pop(replica, None)
        self._work.pop(replica, None)
        self.index.forget(replica)

    def loads(self) -> dict[R, int]:
        """Tokens that calls under way make each replica compute."""
        return {replica: sum(call.tokens for call in calls.values()) for replica, calls in self._calls.items()}

    def matches(self, hashes: Sequence[int]) -> Mapping[R, int]:
        """Tokens of a prompt that replicas hold or are about to; replicas without any are left out."""
        found = {replica: blocks * self._block_tokens for replica, blocks in self.index.match(hashes).items()}
        for replica, calls in self._calls.items():
            coming = max((shared_blocks(call.hashes, hashes) for call in calls.values()), default=0)
            if coming * self._block_tokens > found.get(replica, 0):
                found[replica] = coming * self._block_tokens
        return found

    def rank(self, hashes: Sequence[int], among: Collection[R]) -> list[R]:
        """Some of the replicas in the order in which they should be asked, with the cheapest first."""
        matches, loads, mean = self.matches(hashes), self.loads(), self._mean_work()
        balance = self._balance if hashes else 0  # a call without a prompt has nothing to balance

        def cost(replica: R) -> float:
            past = balance * (self._work.get(replica, mean) - mean)
            return loads.get(replica, 0) + past - self._weight * matches.get(replica, 0)

        shuffled = self._random.sample(list(among), len(among))
        return sorted(shuffled, key=cost)

    def begin(self, replica: R, call: str, hashes: Sequence[int]) -> None:
        """A replica takes a call; its blocks count as the replica's until it ends."""
        if replica in self._calls:
            # At least one token of a prompt is always computed.
            tokens = max(len(hashes) * self._block_tokens - self.matches(hashes).get(replica, 0), 1)
            self._calls[replica][call] = _Call(hashes, tokens)
            self._work[replica] += tokens

    def end(self, replica: R, call: str) -> None:
        self._calls.get(replica, {}).pop(call, None)

    def _mean_work(self) -> float:
        return sum(self._work.values()) / max(len(self._work), 1)


def shared_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading blocks that two prompts share. A block's hash stands for all before it, so bisection finds the last."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[middle - 1] == other[middle - 1] else (low, middle - 1)
    return low
