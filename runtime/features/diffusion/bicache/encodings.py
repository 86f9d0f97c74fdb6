"""Encoded prefixes: an index that finds the longest encoded prefix of a prompt, and their boundary states."""

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
    """The namespace of the encoding of a prefix. `key`: its tokens; `namespace`: of the requests that share it.

    Under bidirectional attention the KV of every row depends on the whole prefix, so different prefixes
    share no page. Within the namespace the tree compares the tokens themselves.
    """
    return namespace.for_entry("bicache", hashlib.blake2b(key, digest_size=16).hexdigest())


class Encodings(Watcher):
    """An index of the encoded prefixes in the tree. It watches the tree and forgets an encoding without pages."""

    def __init__(self, tree: RadixTree):
        self._tree = tree
        self._sizes: dict[Namespace, int] = {}  # bytes of each encoding's key
        self._lengths: dict[Namespace, Counter[int]] = {}  # by namespace of requests: how many keys have which size
        tree.watch(self)

    def __len__(self) -> int:
        return len(self._sizes)

    def match(self, key: bytes, encoding: Namespace) -> Match | None:
        """The match of a complete encoding; None if a page is missing."""
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
        """Index an encoding that is in the tree. `tokens`: the whole prefix; `namespace`: of requests."""
        if encoding not in self._sizes:
            self._sizes[encoding] = size = len(tokens) * TOKEN_BYTES
            self._lengths.setdefault(namespace, Counter())[size] += 1

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        """Forget an encoding when its first node leaves the tree."""
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

    The states depend on this key alone, so they never become stale. The next refresh recomputes evicted states.
    """

    def __init__(self, max_bytes: int):
        """`max_bytes`: limit for the sum of all entries; 0 disables the store."""
        super().__init__(max_bytes, getsizeof=lambda states: states.nbytes)

    def put(self, encoding: Namespace | None, depth: int, states: torch.Tensor) -> None:
        """Store states, unless they exceed the store's limit alone."""
        key = (encoding, len(states), depth)
        if key not in self and states.nbytes <= self.maxsize:
            self[key] = states

    def discard(self, encoding: Namespace | None) -> None:
        """Drop the states of an encoding for all depths."""
        for key in [key for key in self if key[0] == encoding]:
            del self[key]
