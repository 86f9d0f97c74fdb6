"""Eviction by foresight as one would write it down: dictionaries, lists of all that ever waited, and loops.

Nothing of it comes from `radix.foresight` or `radix.returns`: it says the same in another way.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from radix.node import Node

BUCKETS = 34
GAPS = [4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384]
KINDS = 50


def bucket(age: int, last: int = BUCKETS - 1) -> int:
    """Two buckets an octave: 1; 2; 3; 4 and 5; 6 and 7; 8 to 11; ..."""
    return 0 if age == 0 else min(1 + math.floor(math.log2(age * age)), last)


def first_age_behind(k: int) -> int:
    age = int(2 ** (k / 2)) - 1 if k else 0
    while bucket(age, 99) <= k:
        age += 1
    return age


BEHIND = [first_age_behind(k) for k in range(BUCKETS)]
WIDTH = [behind - before for behind, before in zip(BEHIND, [0, *BEHIND], strict=False)]


def gap_class(gap: float) -> int:
    return len([least for least in GAPS if least <= gap])


@dataclass(eq=False)
class Wait:
    """`end`: the bucket of its age at its return; None: it still waits. `lost`: nobody looks any more."""

    since: int
    kind: int
    turn: int
    gap: float
    end: int | None = None
    lost: bool = False
    seen: int = 0

    @property
    def over(self) -> bool:
        return self.lost or self.end is not None

    def next(self, now: int) -> tuple[int, float]:
        """The next turn, and the mean gap: of all gaps, and from the tenth turn on nine parts old and one part new."""
        return min(self.turn + 1, 10), self.gap + (now - self.since - self.gap) / self.turn


class Statistics:
    """Counts of those that entered a bucket, and of those that returned in it, once both are known."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.entered = [[0.0] * BUCKETS for _ in range(KINDS)]
        self.returned = [[0.0] * BUCKETS for _ in range(KINDS)]

    def begin(self, since: int, turn: int, gap: float, shared: bool = False) -> Wait:
        if turn == 1:
            kind = 13
        elif shared:
            kind = gap_class(gap) + 1
        else:
            kind = 14 + 3 * gap_class(gap) + {2: 0, 3: 1, 4: 1}.get(turn, 2)
        self.waits.append(Wait(since, kind, turn, gap))
        return self.waits[-1]

    def learn(self, now: int) -> None:
        for wait in self.waits:
            while wait.seen < BUCKETS and now - wait.since >= BEHIND[wait.seen]:
                k = wait.seen
                wait.seen += 1
                if not wait.lost and (wait.end is None or wait.end >= k):
                    self.entered[wait.kind][k] += 1
                    self.returned[wait.kind][k] += wait.end == k

    def halve(self) -> None:
        for table in (self.entered, self.returned):
            for row in table:
                row[:] = [count / 2 for count in row]

    def promises(self) -> list[list[float]]:
        def pooled(table: list[list[float]], k: int) -> float:
            near = [min(max(i, 0), BUCKETS - 1) for i in (k - 1, k, k, k + 1)]
            return sum(sum(row[i] for row in table[13:]) for i in near)

        usual = [pooled(self.returned, k) / (pooled(self.entered, k) + 50) for k in range(BUCKETS)]
        return [self._index(self._chances(kind, usual)) for kind in range(KINDS)]

    def _chances(self, kind: int, usual: list[float]) -> list[float]:
        entered, returned = self.entered[kind], self.returned[kind]
        often = (sum(returned) + 5) / (sum(e * u for e, u in zip(entered, usual, strict=True)) + 5)
        chances = []
        for k in range(BUCKETS):
            learned = (returned[k] + 30 * often * usual[k]) / (entered[k] + 30)
            early = 0.001 * WIDTH[k] / (BEHIND[k] - WIDTH[k] / 2 + 1)
            chances.append(min(0.98, learned + early) if WIDTH[k] else 0.0)
        return chances

    @staticmethod
    def _index(chance: list[float]) -> list[float]:
        best = []
        for k in range(BUCKETS):
            most, there, hits, time = 1e-12, 1.0, 0.0, 0.0
            for j in range(k, BUCKETS):
                hits += there * chance[j]
                time += there * (WIDTH[j] * (1 - chance[j] / 2))
                there *= 1 - chance[j]
                most = max(most, hits / time if time else 0.0)
            best.append(most)
        return best


@dataclass
class Notes:
    wait: Wait
    branches: int = 0
    settled: bool = False
    asked: tuple | None = None


class PlainForesight:
    """The promises of `Foresight`, while all leaves fit into one sample."""

    def __init__(self, most_ghosts: int, learn_after: tuple[int, int], halve_every: int):
        self.most_ghosts, self.learn_after, self.halve_every = most_ghosts, learn_after, halve_every
        self.learned_at = 0
        self.statistics = Statistics()
        self.notes: dict[Node, Notes] = {}
        self.entered: set[Node] = set()
        self.ghosts: dict[tuple, Wait] = {}
        self.now = self.uses = 0
        self.last_used = self.last_asked = 5.0
        self.share = 1.0
        self.table = self.statistics.promises()

    def mark(self, node: Node, place: int) -> tuple:
        size = len(node.key) // len(node.pages)
        text = node.parent.key[-size:] + node.key if len(node.parent.key) else bytes(size) + node.key
        before = text[place * size : place * size + size] if place or len(node.parent.key) else b""
        return node.namespace, before, text[(place + 1) * size :][:size]

    def used(self, node: Node, tick: int) -> None:
        if node in self.notes:
            self.comes_back(self.notes[node], tick)
        else:
            self.notes[node] = Notes(self.comes_new(node, tick))
        self.uses += 1
        if self.uses % self.halve_every == 0:
            self.statistics.halve()
            self.last_used /= 2
            self.last_asked /= 2
        least, most = self.learn_after
        if self.uses == self.learned_at + sorted((least, self.learned_at // 64, most))[1]:
            self.learned_at = self.uses
            self.statistics.learn(tick)
            self.share = self.last_used / self.last_asked
            self.table = self.statistics.promises()

    def comes_back(self, notes: Notes, tick: int) -> None:
        wait = notes.wait
        age = tick - wait.since
        if not wait.over:
            wait.end = bucket(age)
            if not notes.settled:
                self.last_used += 1
                self.last_asked += 1
        notes.wait = self.statistics.begin(tick, *wait.next(tick), notes.branches > 3)

    def comes_new(self, node: Node, tick: int) -> Wait:
        ghost, above = self.ghosts.pop(self.mark(node, 0), None), self.notes.get(node.parent)
        if above is not None:
            self.entered.discard(node.parent)
            if above.asked is not None:
                self.last_asked += 1
                if above.asked == self.mark(node, 0):
                    self.last_used += 1
            above.branches += 1
            above.settled, above.asked = True, None
        if ghost is not None and not ghost.over:
            age = tick - ghost.since
            ghost.end = bucket(age)
            return self.statistics.begin(tick, *ghost.next(tick))
        if above is None or above.branches > 3:
            return self.statistics.begin(tick, 1, 0)
        if not above.wait.over:
            above.wait.lost = True
        above.wait = self.statistics.begin(tick, above.wait.turn, above.wait.gap)
        return above.wait

    def enter(self, node: Node) -> None:
        self.now = max(self.now, node.last_use)
        self.entered.add(node)

    def split(self, upper: Node, lower: Node) -> None:
        below = self.notes[lower]
        self.notes[upper] = Notes(below.wait, 1, True, None if below.settled else self.mark(lower, 0))

    def leaving(self, node: Node, kept_pages: int) -> None:
        notes = self.notes[node]
        if kept_pages:
            last_alone = not notes.settled and len(node.pages) - kept_pages == 1
            notes.asked, notes.settled = self.mark(node, kept_pages) if last_alone else None, True
        else:
            self.entered.discard(node)
            mark = self.mark(node, 0)
            self.ghosts.pop(mark, None)
            self.ghosts[mark] = notes.wait
            if len(self.ghosts) > self.most_ghosts:
                del self.ghosts[next(iter(self.ghosts))]

    def absorb(self, parent: Node, child: Node) -> None:
        ours, theirs = self.notes[parent], self.notes.pop(child)
        if ours.branches < 4 and theirs.wait.since > ours.wait.since:
            ours.wait = theirs.wait

    def promise(self, node: Node) -> float:
        age, notes = self.now - node.last_use, self.notes[node]
        return self.table[notes.wait.kind][bucket(age)] * (1 if notes.settled else self.share)

    def least(self, free: Callable[[Node], bool]) -> tuple[float, dict[Node, tuple[float, int]]]:
        """The least promise of all, older ones a little less, and for each leaf that with its pages to go."""
        found = {}
        for node in self.entered:
            if free(node):
                one = self.share < 0.9 and not self.notes[node].settled
                older = 1 + 1e-6 * (self.now - node.last_use)
                found[node] = self.promise(node) / older, 1 if one else len(node.pages)
        return min((promise for promise, _ in found.values()), default=0.0), found
