"""Breakpoints of prompts: the places up to which a prompt is kept in the cache."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

from runtime.models.marks import find_place, new_place

B = TypeVar("B")


def find_breakpoints(
    write: Callable[[Callable[[B | None], str]], Any], most: int | None = None
) -> tuple[Any, list[tuple[int, B]]]:
    """A prompt, and its last breakpoints, each with the characters before it.

    Breakpoints never change a prompt: each is found in another rendering, which has a mark there.

    Args:
        write: renders the prompt; its argument is called behind each text, and returns what to write there.
        most: breakpoints to find; the earlier ones are left out. A prompt that is no text has none.
    """
    points: list[B] = []

    def collect(point: B | None) -> str:
        points.extend([] if point is None else [point])
        return ""

    def mark(wanted: int, place: str) -> Callable[[B | None], str]:
        left = count(-wanted)
        return lambda point: "" if point is None or next(left) else place

    prompt, found = write(collect), []
    if isinstance(prompt, str):
        for i in range(len(points))[-(most or len(points)) :]:
            place = new_place()
            found.append((find_place(prompt, write(mark(i, place)), place), points[i]))
    return prompt, found
