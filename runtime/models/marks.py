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


def find_place(text: str, marked: str, mark: str) -> int:
    """Characters of a text before a mark of `new_place` that another rendering of it holds; 0 if it is left out there.

    A template may trim a content, and so write it in another way before a mark: then the place is where that begins.
    """
    before, found, _ = marked.partition(mark)
    if not found:
        return 0
    if text.startswith(before):
        return len(before)
    return bisect(range(1, len(before) + 1), 0, key=lambda length: not text.startswith(before[:length]))
