"""The known encoded prefixes, the search for a prompt's longest one, and the states with which they are refreshed."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter

import torch
from cachetools import LRUCache

from radix import Match, Namespace, Node, RadixTree, Watcher
from radix.node import TOKEN_BYTES
from radix.stats import Cause


def encoding_of(key: bytes, namespace: Namespace) -> Namespace:
    """The namespace of a prefix's encoding; `namespace`: of the requests that share it.

    Under bidirectional attention the KV of every row depends on the whole prefix, so different prefixes
    share no page. Within the namespace the tree compares the tokens themselves.
    """
    return namespace.for_entry("bicache", hashlib.blake2b(key, digest_size=16).hexdigest())


class Encodings(Watcher):
    """Finds encoded prefixes in the tree. Watches it: an encoding is known from `add` until its first page leaves."""

    def __init__(self, tree: RadixTree):
        self._tree = tree
        self._sizes: dict[Namespace, int] = {}  # in bytes
        self._lengths: dict[Namespace, Counter[int]] = {}  # likewise, by the namespace of requests
        tree.watch(self)

    def __len__(self) -> int:
        return len(self._sizes)

    def match(self, key: bytes, encoding: Namespace) -> Match | None:
        """The pages of a whole encoding; None if some of it is missing."""
        found = self._tree.match(key, encoding)
        whole = len(found.pages) * self._tree.page_size * TOKEN_BYTES == len(key)
        return found if whole and found.pages else None

    def discover(self, tokens: array[int], namespace: Namespace, limit: int) -> int:
        """The length of the longest encoded prefix of `tokens[:limit]`; 0 if there is none."""
        key = tokens[:limit].tobytes()
        hashed, at, found = hashlib.blake2b(digest_size=16), 0, []
        for length in sorted(self._lengths.get(namespace, ())):
            if length > len(key):
                break
            hashed.update(key[at:length])
            at = length
            encoding = namespace.for_entry("bicache", hashed.hexdigest())
            if encoding in self._sizes:
                found.append((length, encoding))
        whole = (length for length, encoding in reversed(found) if self.match(key[:length], encoding))
        return next(whole, 0) // TOKEN_BYTES

    def add(self, tokens: array[int], namespace: Namespace, encoding: Namespace) -> None:
        """Remember an encoding of all of `tokens`, which is in the tree."""
        if encoding not in self._sizes:
            self._sizes[encoding] = size = len(tokens) * TOKEN_BYTES
            self._lengths.setdefault(namespace, Counter())[size] += 1

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        """Forget an encoding of which nothing is left."""
        is_first = node.parent is not None and node.parent.parent is None
        if kept_pages or not is_first or (size := self._sizes.pop(node.namespace, None)) is None:
            return
        namespace = node.namespace.without_entry
        lengths = self._lengths[namespace]
        lengths[size] -= 1
        if not lengths[size]:
            del lengths[size]
        if not lengths:
            del self._lengths[namespace]


class BoundaryStore(LRUCache[tuple[Namespace | None, int, int], torch.Tensor]):
    """An LRU store of boundary states, float32 [rows, hidden], by encoding, number of rows and depth.

    They depend on these alone, so no entry grows stale. A lost entry is computed again at the next refresh.
    """

    def __init__(self, max_bytes: int):
        """`max_bytes`: bound on all entries together; 0 keeps none."""
        super().__init__(max_bytes, getsizeof=lambda states: states.nbytes)

    def put(self, encoding: Namespace | None, depth: int, states: torch.Tensor) -> None:
        """Keep states, unless they alone exceed the bound."""
        key = (encoding, len(states), depth)
        if key not in self and states.nbytes <= self.maxsize:
            self[key] = states

    def discard(self, encoding: Namespace | None) -> None:
        """Drop the states of an encoding for all depths."""
        for key in [key for key in self if key[0] == encoding]:
            del self[key]
