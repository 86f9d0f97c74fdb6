"""Prompt lookup: earlier occurrences of a text's last tokens, and the tokens that followed them."""

from __future__ import annotations

from array import array
from collections import OrderedDict

import numpy as np

from radix import Namespace, Node, RadixTree
from radix import text as text_of
from radix.node import TOKEN_BYTES

# Least number of matching tokens; two ids of 21 bits form one key.
LEAST, _BITS = 2, 21
# More new runs than this are indexed with numpy.
_FEW = 4
# Longest match that is counted, and number of latest occurrences that are compared.
_LONGEST, _TRIED = 16, 8
# Tokens of finished outputs remembered per namespace: at least this many, at most twice as many.
_REMEMBERED = 1 << 15
_NAMESPACES = 64


class Places:
    """An index of all runs of `LEAST` tokens in a growing text."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # end index of the latest occurrence of each run
        self._earlier = array("i", [0] * LEAST)  # by end index: the end of the previous occurrence
        self._indexed = 0

    def follow(self, tokens: array[int]) -> None:
        """Index the runs that end before the last token."""
        stop, begin = len(tokens) - 1, max(self._indexed + 1, LEAST)
        if stop - begin > _FEW:
            ids = np.frombuffer(tokens, dtype=np.int32)[begin - LEAST : stop].astype(np.int64)
            self._add((ids[:-1] << _BITS | ids[1:]).tolist(), begin)
        elif begin <= stop:
            self._add([_key(tokens, end) for end in range(begin, stop + 1)], begin)
        self._indexed = max(stop, self._indexed)

    def _add(self, keys: list[int], end: int) -> None:
        """Add runs, the first of which ends at `end`."""
        ends, earlier = self._ends, self._earlier
        for at, key in enumerate(keys, end):
            earlier.append(ends.get(key, 0))
            ends[key] = at

    def find(self, text: array[int], tokens: array[int]) -> tuple[int, int]:
        """Find an earlier occurrence of the last tokens of `tokens` in the indexed `text`.

        Returns:
            The index in `text` of the token that followed, and the number of matching tokens before it, for the longest
            match among the latest occurrences; (0, 0) if there is none.
        """
        at, longest = 0, 0
        end = self._ends.get(_key(tokens, len(tokens)), 0) if len(tokens) >= LEAST else 0
        if not end:
            return 0, 0
        for _ in range(_TRIED):
            if not end or longest >= _LONGEST:
                break
            equal, most = LEAST, min(end, len(tokens), _LONGEST)
            while equal < most and text[end - equal - 1] == tokens[-equal - 1]:
                equal += 1
            if equal > longest:
                at, longest = end, equal
            end = self._earlier[end]
        return at, longest


class RecentOutputs:
    """Outputs of finished requests by namespace; newer outputs replace older ones."""

    def __init__(self) -> None:
        self._texts: OrderedDict[Namespace, list[tuple[array[int], Places]]] = OrderedDict()

    def add(self, namespace: Namespace, tokens: array[int]) -> None:
        """Remember an output. `tokens` starts with the last prompt tokens, which match the output's start."""
        halves = self._texts.setdefault(namespace, [(array("i"), Places())])
        self._texts.move_to_end(namespace)
        if len(halves[-1][0]) >= _REMEMBERED:
            halves.append((array("i"), Places()))
            del halves[:-2]
        text, places = halves[-1]
        text.extend(tokens[-_REMEMBERED:])
        places.follow(text)
        while len(self._texts) > _NAMESPACES:
            self._texts.popitem(last=False)

    def find(self, namespace: Namespace, tokens: array[int], limit: int) -> tuple[array[int], int]:
        """Up to `limit` tokens that followed the last tokens elsewhere, and the length of the match."""
        for text, places in reversed(self._texts.get(namespace, ())):
            at, equal = places.find(text, tokens)
            if equal:
                return text[at : at + limit], equal
        return array("i"), 0

    def clear(self) -> None:
        self._texts.clear()


def continuation(tree: RadixTree, key: bytes, namespace: Namespace, limit: int) -> array[int]:
    """Up to `limit` tokens that follow a key in the tree, on the newest branch."""
    match, found = tree.match(key, namespace), array("i")
    page_bytes = tree.page_size * TOKEN_BYTES
    if len(match.pages) * page_bytes + match.partial_rows * TOKEN_BYTES < len(key):
        return found
    node, at = match.node, match.node_pages * page_bytes
    if match.partial_node is not None:
        at = match.partial_rows * TOKEN_BYTES + (at if match.partial_node is node else 0)
        node = match.partial_node
    while node is not None and len(found) < limit:
        found.frombytes(text_of(node.key)[at : at + (limit - len(found)) * TOKEN_BYTES])
        node, at = _newest(node), 0
    return found


def _newest(node: Node) -> Node | None:
    return next((child for child in reversed(node.children.values()) if not child.is_attached), None)


def _key(tokens: array[int], end: int) -> int:
    """The key of the run that ends before index `end`."""
    return tokens[end - 2] << _BITS | tokens[end - 1]
