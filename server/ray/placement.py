"""Choice of a replica by prefixes, load and past work. Pure: no Ray, no sockets, no clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic

from server.ray.prefixes import PrefixIndex, R

# Blocks that nobody holds any more.
_REMEMBERED = 1 << 18


@dataclass(frozen=True, slots=True)
class _Call(Generic[R]):
    replica: R
    hashes: Sequence[int]
    tokens: int  # that it makes its replica compute


class Placement(Generic[R]):
    """The cheapest replica for a prompt.

    A replica costs the tokens that calls under way make it compute, and a part of what it had to compute more than
    the mean of all. Each token of the prompt that it holds, or will hold after a call under way, counts `weight`
    tokens against that; shared among the calls under way that have it too, but one at least, as a copy of what many
    want soon pays. So nobody waits behind a hot prefix for more than `weight` times what it saves there: the replica
    that takes its overflow computes it once, and has it from then on.

    What nobody holds any more counts as if the replica that lost it held it: its cache has learned when such prompts
    return, and keeps them the better for it.

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
        self.index: PrefixIndex[R] = PrefixIndex(_REMEMBERED)
        self._block_tokens = block_tokens
        self._weight = weight
        self._balance = balance
        self._random = chooser or random.Random()
        self._coming: PrefixIndex[R] = PrefixIndex()
        self._calls: dict[str, _Call[R]] = {}
        self._wanted: dict[R, Counter[int]] = {}  # blocks, by the calls under way that have them
        self._hot: Counter[int] = Counter()  # the same over all replicas
        self._loads: dict[R, int] = {}
        self._work: dict[R, float] = {}

    def join(self, replica: R) -> None:
        """A new replica, which begins with the mean of the others' work: it need not catch up with their past."""
        self._wanted[replica], self._loads[replica], self._work[replica] = Counter(), 0, self._mean_work()

    def leave(self, replica: R) -> None:
        """A replica has left, or died, with all that it held."""
        for call in [name for name, call in self._calls.items() if call.replica == replica]:
            self.end(replica, call)
        for kept in (self._wanted, self._loads, self._work):
            kept.pop(replica, None)
        self._coming.forget(replica)
        self.index.forget(replica)

    @property
    def loads(self) -> Mapping[R, int]:
        """Tokens that calls under way make each replica compute."""
        return self._loads

    def matches(self, hashes: Sequence[int]) -> Mapping[R, int]:
        """Tokens of a prompt that replicas hold or are about to; replicas without any are left out."""
        held, coming = self.index.match(hashes), self._coming.match(hashes)
        most = {replica: max(held.get(replica, 0), coming.get(replica, 0)) for replica in held.keys() | coming.keys()}
        return {replica: blocks * self._block_tokens for replica, blocks in most.items()}

    def rank(self, hashes: Sequence[int], among: Collection[R]) -> list[R]:
        """Some of the replicas in the order in which they should be asked, with the cheapest first."""
        counted, mean = dict(self.matches(hashes)), self._mean_work()
        home, lost = self.index.lost(hashes)
        if home is not None:
            counted[home] = max(counted.get(home, 0), lost * self._block_tokens)
        worth = self._worth(hashes[: max(counted.values(), default=0) // self._block_tokens])
        balance = self._balance if hashes else 0  # a call without a prompt has nothing to balance

        def cost(replica: R) -> float:
            past = balance * (self._work.get(replica, mean) - mean)
            return self._loads.get(replica, 0) + past - worth[counted.get(replica, 0) // self._block_tokens]

        shuffled = self._random.sample(list(among), len(among))
        return sorted(shuffled, key=cost)

    def begin(self, replica: R, call: str, hashes: Sequence[int]) -> None:
        """A replica takes a call; its blocks count as the replica's until it ends. A call that another has moves."""
        if moved := self._calls.get(call):
            self.end(moved.replica, call)
            self._work[moved.replica] -= moved.tokens
        if replica not in self._loads:
            return
        # At least one token of a prompt is always computed.
        tokens = max(len(hashes) * self._block_tokens - self.matches(hashes).get(replica, 0), 1)
        self._calls[call] = _Call(replica, hashes, tokens)
        self._wanted[replica].update(hashes)
        self._hot.update(hashes)
        self._coming.stored(replica, hashes)
        self._loads[replica] += tokens
        self._work[replica] += tokens

    def move(self, replica: R, call: str) -> None:
        """A replica has taken a call that was booked for another one, if it is not over."""
        booked = self._calls.get(call)
        if booked is not None and booked.replica != replica:
            self.begin(replica, call, booked.hashes)

    def end(self, replica: R, call: str) -> None:
        """No matter if it is not there, or no more."""
        ended = self._calls.get(call)
        if ended is None or ended.replica != replica:
            return
        del self._calls[call]
        self._coming.removed(replica, _without(self._wanted[replica], ended.hashes))
        _without(self._hot, ended.hashes)
        self._loads[replica] -= ended.tokens

    def _worth(self, hashes: Sequence[int]) -> list[float]:
        """Tokens of load that the first 0, 1, 2, ... blocks outweigh."""
        shares = (max(self._weight / max(self._hot[value], 1), 1) for value in hashes)
        return [self._block_tokens * total for total in accumulate(shares, initial=0.0)]

    def _mean_work(self) -> float:
        return sum(self._work.values()) / max(len(self._work), 1)


def _without(counts: Counter[int], values: Sequence[int]) -> list[int]:
    """Count each value once less; those that are left no more."""
    counts.subtract(values)
    gone = [value for value in values if not counts[value]]
    for value in gone:
        del counts[value]
    return gone
