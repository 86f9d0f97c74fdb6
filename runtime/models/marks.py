"""Marks: contents of messages at which a chat template's text is cut.

Nobody can guess a mark, so that no text of a user is taken for the template's, nor the other way round.
"""

from __future__ import annotations

import secrets
from bisect import bisect
from collections.abc import Sequence


def new_mark() -> str:
    """A content that is found again only if the template writes it as it is: without escapes, in the same case."""
    return f'{secrets.token_hex(16)}\n <"Aa">  {secrets.token_hex(4)}'


def cut(text: str, marks: Sequence[str]) -> list[str] | None:
    """The text before, between and behind marks; None unless each of them is there once, in this order."""
    pieces = []
    for mark in marks:
        before, found, text = text.partition(mark)
        pieces.append(before)
        if not found or mark in text:
            return None
    return [*pieces, text]


def new_place() -> str:
    """A mark that is found again even where the template escapes what it writes."""
    return secrets.token_hex(16)


def find_places(text: str, marked: str, marks: Sequence[str]) -> list[int]:
    """Characters of a text before each mark of another rendering of it, which holds marks of `new_place`.

    A template may trim a content, and so write it in another way before a mark: then the place is where that begins. It
    is 0 for a mark that the template leaves out.
    """
    places = []
    for mark in marks:
        before, found, _ = marked.partition(mark)
        for other in marks:
            before = before.replace(other, "")
        places.append(_common(text, before) if found else 0)
    return places


def _common(text: str, other: str) -> int:
    """Characters with which both texts begin."""
    if text.startswith(other):
        return len(other)
    return bisect(range(1, len(other) + 1), 0, key=lambda length: not text.startswith(other[:length]))
