"""The known encoded prefixes, and the search for those with which a prompt begins."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from dataclasses import dataclass

from radix import Match, Namespace, Node, RadixTree, Watcher
from radix.node import TOKEN_BYTES
from radix.stats import Cause
from runtime.reuse.bicache.encoding_index import EncodingIndex
from runtime.reuse.bicache.shallow_meta import ShallowMeta, meet_all


@dataclass(frozen=True, slots=True)
class Beginning:
    """Leading tokens of an encoded prefix.

    Attributes:
        encoding: namespace in the tree; None: nothing is shared.
        length: tokens of the beginning.
        encoded: tokens of the whole encoding.
        meta: the record of its nodes; None: it has to be encoded.
    """

    encoding: Namespace | None
    length: int
    encoded: int
    meta: ShallowMeta | None = None


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
        self._keys: dict[Namespace, bytes] = {}
        self._lengths: dict[Namespace, Counter[int]] = {}  # in bytes, by the namespace of requests
        self._index = EncodingIndex()
        tree.watch(self)

    def __len__(self) -> int:
        return len(self._keys)

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
            if encoding in self._keys:
                found.append((length, encoding))
        whole = (length for length, encoding in reversed(found) if self.match(key[:length], encoding))
        return next(whole, 0) // TOKEN_BYTES

    def beginning(self, tokens: array[int], namespace: Namespace, limit: int) -> Beginning | None:
        """The encoding with most whole pages of `tokens[:limit]` in the tree; None if there is no page."""
        key, best = tokens[:limit].tobytes(), None
        for encoding in self._index.neighbours(namespace, key):
            found = self._tree.match(key, encoding)
            meta = meet_all(found.node)
            length = len(found.pages) * self._tree.page_size
            if meta is not None and (best is None or length > best.length):
                best = Beginning(encoding, length, meta.encoded_tokens, meta)
        return best

    def add(self, tokens: array[int], namespace: Namespace, encoding: Namespace) -> None:
        """Remember an encoding of all of `tokens`, which is in the tree."""
        if encoding in self._keys:
            return
        self._keys[encoding] = key = tokens.tobytes()
        self._lengths.setdefault(namespace, Counter())[len(key)] += 1
        self._index.add(namespace, key, encoding)

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        """Forget an encoding of which nothing is left."""
        is_first = node.parent is not None and node.parent.parent is None
        if kept_pages or not is_first or (key := self._keys.pop(node.namespace, None)) is None:
            return
        namespace = node.namespace.without_entry
        lengths = self._lengths[namespace]
        lengths[len(key)] -= 1
        if not lengths[len(key)]:
            del lengths[len(key)]
        if not lengths:
            del self._lengths[namespace]
        self._index.remove(namespace, key, node.namespace)
