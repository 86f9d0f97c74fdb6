"""Marks: contents of messages at which a chat template's text is cut.

Nobody can guess a mark, so that no text of a user is taken for the template's, nor the other way round.
"""

from __future__ import annotations

import secrets
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
