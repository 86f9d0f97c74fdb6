"""A simulated fleet: replicas with a real tree and a clock of their own behind the router's real policy."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from loadgen.micro.stress import Trace
from radix import EventLog, Namespace, RadixTree, Stored, make_policy
from radix.events import block_hashes
from server.ray.placement import Placement

# Bytes of a block's id, which stands for all its tokens.
_ID = 4
# Tokens of a block of Mooncake's traces.
BLOCK_TOKENS = 512

# All conversations of Mooncake's trace share their first block; this one tells them apart.
_NAMED = 2

# Chooses one of the replicas for a prompt of these blocks.
Route = Callable[[Placement[int], Sequence[int]], int]


def routes(replicas: int, weight: float, balance: float, seed: int) -> dict[str, tuple[Placement[int], Route]]:
    """Routers by name, with what each knows of the replicas; `prefix and work` is the one that Ray Serve runs here."""
    draw, turn, everybody = random.Random(seed), count(), range(replicas)

    def lighter(known: Placement[int], hashes: Sequence[int]) -> int:
        return min(draw.sample(everybody, min(2, replicas)), key=known.loads.__getitem__)

    def placed(known: Placement[int], hashes: Sequence[int]) -> int:
        return known.rank(hashes, everybody)[0]

    homes: dict[int, int] = {}
    dealt = [0] * replicas

    def settled(known: Placement[int], hashes: Sequence[int]) -> int:
        chosen = homes.setdefault(hashes[:_NAMED][-1], min(everybody, key=dealt.__getitem__))
        dealt[chosen] += len(hashes)
        return chosen

    def place(weight: float, balance: float) -> Placement[int]:
        return Placement(BLOCK_TOKENS, weight, balance, random.Random(seed))

    return {
        "random": (place(0, 0), lambda known, hashes: draw.randrange(replicas)),
        "round robin": (place(0, 0), lambda known, hashes: next(turn) % replicas),
        "power of two": (place(0, 0), lighter),
        "conversation's home": (place(0, 0), settled),
        "longest prefix": (place(1e6, 0), placed),
        "prefix and load": (place(weight, 0), placed),
        "prefix and work": (place(weight, balance), placed),
    }


@dataclass(slots=True)
class Findings:
    """Of a run: blocks asked for and cached, blocks computed by replica, seconds until prompts were computed."""

    blocks: int = 0
    hits: int = 0
    computed: list[int] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.blocks

    @property
    def imbalance(self) -> float:
        """Computed blocks of the busiest replica, as a multiple of the mean."""
        return max(self.computed) * len(self.computed) / sum(self.computed)


@dataclass(slots=True)
class _Job:
    arrived_s: float
    key: bytes
    hashes: Sequence[int]


class _Replica:
    """A tree of bounded size, and prompts that are computed one after another."""

    def __init__(self, capacity: int):
        self.log = EventLog(_ID)
        self.tree = RadixTree(1, make_policy("foresight", capacity), lambda: self.now_s, watchers=[self.log])
        self.now_s = 0.0
        self.queue: deque[_Job] = deque()
        self.free = capacity
        self.capacity = capacity
        self.serial = 0

    def begin(self, job: _Job) -> int:
        """Blocks of the prompt that have to be computed."""
        match = self.tree.match(job.key)
        self.tree.use(match.node)
        return len(job.hashes) - len(match.pages)

    def end(self, job: _Job) -> None:
        """Keep the prompt's blocks, as far as they fit."""
        match = self.tree.match(job.key)
        node = self.tree.lock_match(match)
        fresh = min(len(job.hashes) - len(match.pages), self.capacity - self.tree.num_locked_pages)
        if fresh > self.free:
            self.free += len(self.tree.evict(fresh - self.free))
        pages = match.pages + array("i", range(self.serial, self.serial + fresh))
        self.tree.insert(job.key, pages)
        self.tree.unlock(node)
        self.free, self.serial = self.free - fresh, (self.serial + fresh) % (1 << 30)


class Fleet:
    """Replays a trace.

    Args:
        known, route: the router.
        replicas: their number.
        capacity: blocks of each one's cache.
        block_s: seconds in which a replica computes a block.
        delay_s: time that KV events take to the router.
    """

    def __init__(
        self,
        known: Placement[int],
        route: Route,
        replicas: int,
        capacity: int,
        block_s: float,
        delay_s: float = 0.05,
    ):
        self._known = known
        self._route = route
        self._replicas = [_Replica(capacity) for _ in range(replicas)]
        self._block_s = block_s
        self._delay_s = delay_s
        for number in range(replicas):
            known.join(number)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self.found = Findings(computed=[0] * replicas)

    def run(self, trace: Trace) -> Findings:
        """Replay all requests at their times, and let what has begun end."""
        for at_s, blocks in trace:
            self._until(at_s)
            self._arrive(_Job(at_s, blocks.tobytes(), block_hashes(blocks.tobytes(), _ID, None, Namespace())))
        self._until(float("inf"))
        return self.found

    def _until(self, at_s: float) -> None:
        while self._events and self._events[0][0] <= at_s:
            now_s, _, act = heappop(self._events)
            act(now_s)

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        heappush(self._events, (at_s, next(self._order), act))

    def _arrive(self, job: _Job) -> None:
        chosen = self._route(self._known, job.hashes)
        self._known.begin(chosen, str(id(job)), job.hashes)
        queue = self._replicas[chosen].queue
        queue.append(job)
        if len(queue) == 1:
            self._begin(chosen, job.arrived_s)

    def _begin(self, number: int, now_s: float) -> None:
        replica = self._replicas[number]
        replica.now_s = now_s
        computed = replica.begin(job := replica.queue[0])
        self.found.blocks += len(job.hashes)
        self.found.hits += len(job.hashes) - computed
        self.found.computed[number] += computed
        self._at(now_s + computed * self._block_s, lambda end_s: self._end(number, end_s))

    def _end(self, number: int, now_s: float) -> None:
        replica = self._replicas[number]
        job, replica.now_s = replica.queue.popleft(), now_s
        replica.end(job)
        self._known.end(number, str(id(job)))
        self.found.waits_s.append(now_s - job.arrived_s)
        self.found.at_s.append(job.arrived_s)
        if changes := replica.log.take():
            self._at(now_s + self._delay_s, lambda _: self._hear(number, changes))
        if replica.queue:
            self._begin(number, now_s)

    def _hear(self, number: int, changes: Sequence[object]) -> None:
        for change in changes:
            book = self._known.index.stored if isinstance(change, Stored) else self._known.index.removed
            book(number, change.hashes)  # type: ignore[attr-defined]
