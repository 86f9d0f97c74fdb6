"""Marks: random message contents at which the rendered text of a chat template is cut.

Marks are random, so user text is never mistaken for template text, nor the other way round.
"""

import secrets
from bisect import bisect
from collections.abc import Sequence


def new_mark() -> str:
    """A mark that survives only if the template writes contents unchanged, without escapes and in the same case."""
    return f'{secrets.token_hex(16)}\n <"Aa">  {secrets.token_hex(4)}'


def cut(text: str, marks: Sequence[str]) -> list[str] | None:
    """The text before, between and after marks; None unless each occurs exactly once, in this order."""
    pieces = []
    for mark in marks:
        before, found, text = text.partition(mark)
        pieces.append(before)
        if not found or mark in text:
            return None
    return [*pieces, text]


def new_place() -> str:
    """A mark that survives templates that escape contents."""
    return secrets.token_hex(16)


def find_place(text: str, marked: str, mark: str) -> int:
    """The position in `text` that corresponds to the mark in `marked`, another rendering; 0 if the mark is missing.

    A template may trim contents, so the text before the mark may differ: then this is where the difference begins.
    """
    before, found, _ = marked.partition(mark)
    if not found:
        return 0
    if text.startswith(before):
        return len(before)
    return bisect(range(1, len(before) + 1), 0, key=lambda length: not text.startswith(before[:length]))
