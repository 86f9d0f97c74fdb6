"""Chooses replicas by prefix, load and past work, without Ray, sockets or a clock."""

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic

from server.ray.prefixes import PrefixIndex, R

# Number of evicted blocks whose last holder is remembered.
_REMEMBERED = 1 << 18


@dataclass(frozen=True, slots=True)
class _Call(Generic[R]):
    replica: R
    hashes: Sequence[int]
    tokens: int  # tokens that the replica computes


class Placement(Generic[R]):
    """Ranks replicas by their cost for a prompt, in tokens.

    A replica's cost is the number of tokens that its running calls still have to compute, plus `balance` times its past
    work above the mean, minus the worth of the prompt's tokens that it holds or computes. A token is worth `weight`
    tokens divided by the number of running calls that read it, but at least 1, because a second copy of a hot prefix
    soon pays. So a request waits behind a hot prefix for at most `weight` times the work that it saves there.

    A block that no replica holds counts for its last holder, whose eviction policy has learned when it is used.

    Args:
        block_tokens: number of tokens in a block.
        weight: more than 1, because a second copy of a prefix also costs memory and later hits.
        balance: load, in tokens, of a token of past work above the mean.
        chooser: random numbers for the choice among equal replicas.

    Attributes:
        index: the blocks that replicas hold; their events update it.
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
        self._wanted: dict[R, Counter[int]] = {}  # by replica and block: the number of running calls
        self._hot: Counter[int] = Counter()  # by block: the number of running calls on all replicas
        self._loads: dict[R, int] = {}
        self._work: dict[R, float] = {}

    def join(self, replica: R) -> None:
        """Add a replica. It begins with the mean of past work, so that it gets no more calls than others."""
        self._wanted[replica], self._loads[replica], self._work[replica] = Counter(), 0, self._mean_work()

    def leave(self, replica: R) -> None:
        """Remove a replica that left or died, with its calls and blocks."""
        for call in [name for name, call in self._calls.items() if call.replica == replica]:
            self.end(replica, call)
        for kept in (self._wanted, self._loads, self._work):
            kept.pop(replica, None)
        self._coming.forget(replica)
        self.index.forget(replica)

    @property
    def loads(self) -> Mapping[R, int]:
        """By replica, the tokens that running calls have to compute."""
        return self._loads

    def matches(self, hashes: Sequence[int]) -> Mapping[R, int]:
        """By replica, the prompt's leading tokens that it holds or computes; without replicas that have none."""
        held, coming = self.index.match(hashes), self._coming.match(hashes)
        most = {replica: max(held.get(replica, 0), coming.get(replica, 0)) for replica in held.keys() | coming.keys()}
        return {replica: blocks * self._block_tokens for replica, blocks in most.items()}

    def rank(self, hashes: Sequence[int], among: Collection[R]) -> list[R]:
        """The replicas `among`, cheapest first."""
        counted, mean = dict(self.matches(hashes)), self._mean_work()
        home, lost = self.index.lost(hashes)
        if home is not None:
            counted[home] = max(counted.get(home, 0), lost * self._block_tokens)
        worth = self._worth(hashes[: max(counted.values(), default=0) // self._block_tokens])
        balance = self._balance if hashes else 0  # past work does not matter without a prompt

        def cost(replica: R) -> float:
            past = balance * (self._work.get(replica, mean) - mean)
            return self._loads.get(replica, 0) + past - worth[counted.get(replica, 0) // self._block_tokens]

        shuffled = self._random.sample(list(among), len(among))
        return sorted(shuffled, key=cost)

    def begin(self, replica: R, call: str, hashes: Sequence[int]) -> None:
        """Start a call on a replica, or move a started one. Until its end the replica counts as holding its blocks."""
        if moved := self._calls.get(call):
            self.end(moved.replica, call)
            self._work[moved.replica] -= moved.tokens
        if replica not in self._loads:
            return
        # At least one token of a prompt must be computed.
        tokens = max(len(hashes) * self._block_tokens - self.matches(hashes).get(replica, 0), 1)
        self._calls[call] = _Call(replica, hashes, tokens)
        self._wanted[replica].update(hashes)
        self._hot.update(hashes)
        self._coming.stored(replica, hashes)
        self._loads[replica] += tokens
        self._work[replica] += tokens

    def move(self, replica: R, call: str) -> None:
        """Move a running call to the replica that accepted it."""
        booked = self._calls.get(call)
        if booked is not None and booked.replica != replica:
            self.begin(replica, call, booked.hashes)

    def end(self, replica: R, call: str) -> None:
        """End a call. Unknown calls are ignored."""
        ended = self._calls.get(call)
        if ended is None or ended.replica != replica:
            return
        del self._calls[call]
        self._coming.removed(replica, _without(self._wanted[replica], ended.hashes))
        _without(self._hot, ended.hashes)
        self._loads[replica] -= ended.tokens

    def _worth(self, hashes: Sequence[int]) -> list[float]:
        """The worth of the first 0, 1, 2, ... blocks, in tokens of load."""
        shares = (max(self._weight / max(self._hot[value], 1), 1) for value in hashes)
        return [self._block_tokens * total for total in accumulate(shares, initial=0.0)]

    def _mean_work(self) -> float:
        return sum(self._work.values()) / max(len(self._work), 1)


def _without(counts: Counter[int], values: Sequence[int]) -> list[int]:
    """Decrement the counts; returns the values that reach 0."""
    counts.subtract(values)
    gone = [value for value in values if not counts[value]]
    for value in gone:
        del counts[value]
    return gone
