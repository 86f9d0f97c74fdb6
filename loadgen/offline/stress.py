"""Traces that are hard for eviction policies, each for a different reason. Equal seeds give equal traces."""

import random
from array import array
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count

from loadgen.offline.traffic import Trace

Prompts = Iterator[list[int]]


class _Blocks:
    """A source of unused block ids and random choices."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self._ids = count()

    def new(self, least: int, most: int | None = None) -> list[int]:
        """`least` new blocks, or between `least` and `most`."""
        size = least if most is None else self.draw.randint(least, most)
        return [next(self._ids) for _ in range(size)]

    def several(self, number: int, least: int, most: int) -> list[list[int]]:
        return [self.new(least, most) for _ in range(number)]

    def popular(self, items: list[list[int]]) -> list[int]:
        """A random item; the n-th is drawn 1 / n times as often as the first."""
        return self.draw.choices(items, [1 / (i + 1) for i in range(len(items))])[0]


def _loop(blocks: _Blocks) -> Prompts:
    """The same documents over and over: the one used least recently is the next."""
    documents = blocks.several(120, 10, 30)
    for i in range(3_000):
        yield documents[i % len(documents)] + blocks.new(1)


def _scans(blocks: _Blocks) -> Prompts:
    """Popular documents, and every now and then a long row of prompts that never return."""
    documents = blocks.several(150, 5, 30)
    for i in range(5_000):
        yield blocks.new(10, 30) if i % 1_000 < 300 else blocks.popular(documents) + blocks.new(1, 3)


def _phases(blocks: _Blocks) -> Prompts:
    """Other documents are popular after every thousand requests, and other kinds of traffic: documents, then chats."""
    for phase in range(6):
        documents = blocks.several(100, 5, 40)
        chats = [blocks.new(2)]
        for _ in range(1_000):
            if phase % 2:
                if blocks.draw.random() < 0.2:
                    chats = [*chats[-40:], blocks.new(2, 8)]
                chat = blocks.draw.choice(chats)
                chat.extend(blocks.new(1, 3))
                yield list(chat)
            else:
                yield blocks.popular(documents) + blocks.new(1)


def _bursts(blocks: _Blocks) -> Prompts:
    """A prompt is repeated several times, then again after a long pause."""
    resting: list[tuple[int, int, list[int]]] = []
    for i in range(900):
        prompt = blocks.new(10, 40)
        heappush(resting, (i + blocks.draw.randint(20, 400), i, prompt))
        for _ in range(blocks.draw.randint(1, 4)):
            yield prompt + blocks.new(1)
        while resting and resting[0][0] <= i:
            again = heappop(resting)[2]
            for _ in range(blocks.draw.randint(1, 4)):
                yield again + blocks.new(1)


def _sessions(blocks: _Blocks, wait: Callable[[], float], turns: tuple[int, int], systems: list[list[int]]) -> Prompts:
    """Sessions that grow turn by turn; the last block of a prompt is not full, so that the next turn has another.

    Args:
        blocks: the source.
        wait: time from one turn to the next; a new session begins every unit of time.
        turns: least and most turns of a session.
        systems: what sessions begin with; the first is the most popular.
    """
    due: list[tuple[float, int, int, list[int]]] = []
    for i in range(500):
        heappush(due, (i * 1.0, i, blocks.draw.randint(*turns), [*blocks.popular(systems), *blocks.new(1, 12)]))
        while due and due[0][0] <= i:
            now, number, left, prompt = heappop(due)
            yield prompt + blocks.new(1)
            prompt.extend(blocks.new(1, 4))
            if left > 1:
                heappush(due, (now + wait(), number, left - 1, prompt))


def _agents(blocks: _Blocks) -> Prompts:
    """Many quick turns with tools, a few at a time."""
    yield from _sessions(blocks, lambda: blocks.draw.expovariate(0.3), (5, 20), blocks.several(3, 10, 20))


def _side_requests(blocks: _Blocks) -> Prompts:
    """About four agents at a time, of 40 turns each, with titles, subagents and one-off prompts in between.

    A message of the user follows every fifth turn. From then on, the thoughts of the turns before are left out.
    """
    draw, system, subagent, title = blocks.draw, blocks.new(120), blocks.new(60), blocks.new(2)
    due: list[tuple[float, int, int, list[int], list[int]]] = []
    for number in range(20):
        # Turn, the conversation up to the user's last message, and what followed without thoughts.
        heappush(due, (number * 450.0, number, 0, system + blocks.new(2), []))
    serials, seen = count(20), dict[int, list[int]]()
    while due:
        now, number, turn, past, plain = heappop(due)
        since = seen.get(number, [])
        yield past + since + blocks.new(1)
        if turn < 0:  # a subagent, whose turns are left to do
            wait, past = 2 + draw.expovariate(0.2), past + blocks.new(6, 29)
            if turn < -1:
                heappush(due, (now + wait, number, turn + 1, past, []))
            continue
        if turn % 8 == 0:
            yield title + blocks.new(2, 15)
        if draw.random() < 0.2:
            yield blocks.new(10, 80)
        wait = 3 + draw.expovariate(0.125)
        if draw.random() < 0.15:
            for i in range(draw.choice((1, 1, 2, 3))):
                heappush(due, (now + 2 + i, next(serials), -draw.randint(3, 10), subagent + blocks.new(3, 10), []))
            wait += 60
        thoughts, said = blocks.new(3, 8), blocks.new(6, 44)
        seen[number], plain = [*since, *thoughts, *said], [*plain, *said]
        if (turn + 1) % 5 == 0:
            past, plain, seen[number] = [*past, *plain, *blocks.new(1, 5)], [], []
            wait = draw.lognormvariate(4.5, 1)
        if turn < 39:
            heappush(due, (now + wait, number, turn + 1, past, plain))


def _chats(blocks: _Blocks) -> Prompts:
    """A few turns, with minutes between them."""
    yield from _sessions(blocks, lambda: blocks.draw.lognormvariate(3, 1), (1, 8), blocks.several(20, 1, 6))


def _best_of_n(blocks: _Blocks) -> Prompts:
    """A search over thoughts: several continuations of each prompt, the best of which is continued."""
    open_ones: list[tuple[int, list[int]]] = []
    for _ in range(4_000 // 4):
        if not open_ones or (len(open_ones) < 60 and blocks.draw.random() < 0.2):
            open_ones.append((blocks.draw.randint(4, 12), blocks.new(10, 30)))
        depth, prompt = open_ones.pop(blocks.draw.randrange(len(open_ones)))
        branches = [prompt + blocks.new(1, 3) for _ in range(4)]
        yield from branches
        if depth > 1:
            open_ones.append((depth - 1, blocks.draw.choice(branches)))


def _documents(blocks: _Blocks) -> Prompts:
    """Long documents of very different lengths, some of them popular, with short questions."""
    documents = blocks.several(60, 5, 20) + blocks.several(60, 50, 150)
    blocks.draw.shuffle(documents)
    for _ in range(3_000):
        yield blocks.popular(documents) + blocks.new(1, 2)


def _recent(blocks: _Blocks) -> Prompts:
    """The most recent prompt is the most likely to return, so LRU is optimal."""
    stack: list[list[int]] = []
    for _ in range(4_000):
        place = int(blocks.draw.paretovariate(0.4))
        prompt = stack.pop(-place) if place <= len(stack) else blocks.new(5, 20)
        stack.append(prompt)
        yield list(prompt)


def _uniform(blocks: _Blocks) -> Prompts:
    """All prompts are equally likely, independent of the past."""
    documents = blocks.several(300, 5, 20)
    for _ in range(4_000):
        yield blocks.draw.choice(documents) + blocks.new(1)


_MAKERS: dict[str, Callable[[_Blocks], Prompts]] = {
    "loop": _loop, "scans": _scans, "phases": _phases, "bursts": _bursts, "agents": _agents,
    "side requests": _side_requests, "chats": _chats, "best of n": _best_of_n, "documents": _documents,
    "recent": _recent, "uniform": _uniform,
}  # fmt: skip
STRESS = tuple(_MAKERS)


def stress_trace(name: str, seed: int = 0) -> Trace:
    """A trace by its name, with a request every second."""
    prompts = _MAKERS[name](_Blocks(seed))
    return [(float(i), array("i", prompt)) for i, prompt in enumerate(prompts)]
