"""Pages that several requests of a step share: the edges of tree attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from radix.node import TOKEN_BYTES, common_tokens


@dataclass(frozen=True, slots=True)
class Stretch:
    """Pages `start` to `stop` of the page tables `first` to `last` (exclusive), which are the same in all of them."""

    first: int
    last: int
    start: int
    stop: int


def stretches(tables: Sequence[bytes], page_size: int, least_saved_tokens: int = 256) -> list[Stretch]:
    """Cut sorted page tables into stretches that are worth reading once, and the rest of each table.

    The tree is not consulted: requests share a node exactly where they share its pages.

    Args:
        tables: int32 page ids as bytes, in ascending order of these bytes.
        page_size: tokens in a page.
        least_saved_tokens: least number of token reads that a shared stretch must save, since an edge of its own costs
            a merge of partial results for each of its rows.

    Returns:
        Stretches that cover every table exactly once; the last of each table is its own and may be empty.
    """
    found: list[Stretch] = []
    pending = [(0, len(tables), 0, 0)] if tables else []
    while pending:
        first, last, start, at = pending.pop()
        if last - first == 1:
            found.append(Stretch(first, last, start, len(tables[first]) // TOKEN_BYTES))
            continue
        # The first and the last of sorted tables share the least.
        shared = at + common_tokens(tables[first], at * TOKEN_BYTES, tables[last - 1][at * TOKEN_BYTES :])
        if (shared - start) * page_size * (last - first - 1) >= least_saved_tokens:
            found.append(Stretch(first, last, start, shared))
            start = shared
        parting = slice(shared * TOKEN_BYTES, (shared + 1) * TOKEN_BYTES)
        for page, group in groupby(range(first, last), key=lambda i: tables[i][parting]):
            members = list(group)
            if page:
                pending.append((members[0], members[-1] + 1, start, shared))
            else:  # tables that end here; they differ in nothing, but each has its own rows
                pending.extend((i, i + 1, start, shared) for i in members)
    return found
