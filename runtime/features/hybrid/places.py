"""The places of a prompt at which the state is kept: where later prompts are known, or likely, to part from it."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence

import numpy as np

# A point is worth its memory if it saves at least this part of the tokens whose KV takes as much memory.
_WORTH = 16
# Long prompts also have places at this many times that number, and then at each doubling.
_FIRST = 4
# Points that `Uses` remembers; it halves older counts.
_REMEMBERED = 256
# A kind of points is in vain if it is used less than this share as often as the other.
_RARELY = 0.25


def least_saving(cost: int) -> int:
    """Least number of tokens between two points; `cost`: see `Points`."""
    return max(cost // _WORTH, 1)


def ends_of_turns(tokens: array[int], stops: Collection[int]) -> list[int]:
    """Numbers of leading tokens, each up to and including a token of `stops`, which end the turns of a chat."""
    ids = np.frombuffer(tokens, dtype=np.int32)
    found: list[int] = (np.flatnonzero(np.isin(ids, list(stops))) + 1).tolist()
    return found


def choose(
    begin: int, end: int, turns: Sequence[int], asked: Iterable[int], shared: int, cost: int, most: int
) -> list[int]:
    """Places of a prompt, ascending: a place is the number of tokens before it.

    Args:
        begin: place at which the request resumes.
        end: the prompt's own end. A repeated prompt resumes there.
        turns: the result of `ends_of_turns`. Prompts with the same system message and tools part behind the first one;
            the next turn of a conversation resumes at least behind the last one, however its template shows the answer.
        asked: places that the client or an operator asks for.
        shared: place at which another sequence parts from this one, as its KV in the tree shows.
        cost: see `Points`.
        most: number of tokens that are computed.
    """
    least = least_saving(cost)
    found = {place for place in asked if begin < place <= most}
    wanted = [*turns[-1:], *turns[:1], end, shared]
    for place in wanted:
        if begin + least <= place <= most and not any(0 <= place - other < least for other in found):
            found.add(place)
    place = _FIRST * cost
    while place < end:
        if place - begin >= least and all(abs(place - other) >= least for other in found):
            found.add(place)
        place *= 2
    return sorted(found)


class Uses:
    """Which points the next turns of conversations use: those where prompts end, or those where answers end.

    If a template leaves the reasoning out of later prompts, the points behind answers are in vain; otherwise the points
    behind prompts are.
    """

    def __init__(self) -> None:
        self._stored = {"prompt": 4.0, "answer": 4.0}
        self._used = {"prompt": 2.0, "answer": 2.0}

    def stored(self, behind: str) -> None:
        if behind in self._stored:
            self._stored[behind] += 1
            if self._stored[behind] > _REMEMBERED:
                self._stored[behind] /= 2
                self._used[behind] /= 2

    def used(self, behind: str) -> None:
        """A point was used for the first time."""
        if behind in self._used:
            self._used[behind] += 1

    def vain(self) -> str:
        """The kind that is rarely used in comparison with the other; empty if both are."""
        prompt, answer = (self._used[behind] / self._stored[behind] for behind in ("prompt", "answer"))
        return "prompt" if prompt < _RARELY * answer else "answer" if answer < _RARELY * prompt else ""
