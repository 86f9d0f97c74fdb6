"""Marks: random message contents that show where a chat template puts the contents of messages.

Marks are random, so that neither user text nor template text contains one.
"""

import secrets
from bisect import bisect
from collections.abc import Sequence


def new_mark() -> str:
    """A mark that survives only if the template writes contents unchanged, without escapes and in the same case."""
    return f'{secrets.token_hex(16)}\n <"Aa">  {secrets.token_hex(4)}'


def cut(text: str, marks: Sequence[str]) -> list[str] | None:
    """The text before, between and after the marks; None unless each mark occurs exactly once, in this order."""
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
    """The position in `text` of the mark in `marked`, another rendering of the same chat; 0: the mark is missing.

    A template may trim contents, so the texts before the mark may differ. Then the result is the first difference.
    """
    before, found, _ = marked.partition(mark)
    if not found:
        return 0
    if text.startswith(before):
        return len(before)
    return bisect(range(1, len(before) + 1), 0, key=lambda length: not text.startswith(before[:length]))
