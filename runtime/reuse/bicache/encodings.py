"""The known encoded prefixes, and the search for those with which a prompt begins."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

from radix import Match, Namespace, RadixTree
from radix.node import TOKEN_BYTES
from runtime.reuse.bicache.encoding_index import EncodingIndex
from runtime.reuse.bicache.shallow_meta import ShallowMeta, meet_all

# Encodings that are remembered beyond the tree's nodes, before those that the tree has lost are forgotten.
_SLACK = 1024


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


class Encodings:
    """Finds encoded prefixes in the tree."""

    def __init__(self, tree: RadixTree):
        self._tree = tree
        self._known: dict[Namespace, dict[int, set[Namespace]]] = {}
        self._num_known = 0
        self._index = EncodingIndex()

    def match(self, key: bytes, encoding: Namespace) -> Match | None:
        """The pages of a whole encoding; None if some of it is missing."""
        found = self._tree.match(key, encoding)
        whole = len(found.pages) * self._tree.page_size * TOKEN_BYTES == len(key)
        return found if whole and found.pages else None

    def discover(self, tokens: array[int], namespace: Namespace, limit: int) -> int:
        """The length of the longest encoded prefix of `tokens[:limit]`; 0 if there is none."""
        known = self._known.get(namespace, {})
        hashed, at, found = hashlib.blake2b(digest_size=16), 0, []
        for length in sorted(known):
            if length > limit:
                break
            hashed.update(tokens[at:length].tobytes())
            at = length
            encoding = namespace.for_entry("bicache", hashed.hexdigest())
            if encoding in known[length]:
                found.append((length, encoding))
        for length, encoding in reversed(found):
            if self.match(tokens[:length].tobytes(), encoding):
                return length
            known[length].discard(encoding)
            self._num_known -= 1
        return 0

    def beginning(self, tokens: array[int], namespace: Namespace, limit: int) -> Beginning | None:
        """The encoding with most whole pages of `tokens[:limit]` in the tree; None if there is no page."""
        key, best = tokens[:limit].tobytes(), None
        for whole, encoding in self._index.neighbours(namespace, key):
            found = self._tree.match(key, encoding)
            meta = meet_all(found.node)
            length = len(found.pages) * self._tree.page_size
            if meta is None:
                if not self._tree.match(whole, encoding).pages:
                    self._index.discard(namespace, whole, encoding)
            elif best is None or length > best.length:
                best = Beginning(encoding, length, meta.encoded_tokens, meta)
        return best

    def add(self, tokens: array[int], namespace: Namespace, encoding: Namespace) -> None:
        """Remember an encoding of all of `tokens`."""
        encodings = self._known.setdefault(namespace, {}).setdefault(len(tokens), set())
        self._num_known += encoding not in encodings
        encodings.add(encoding)
        self._index.add(namespace, tokens.tobytes(), encoding)
        if self._num_known > 2 * self._tree.num_nodes + _SLACK:
            self._forget({there for there, _ in self._tree.roots()})

    def _forget(self, there: set[Namespace]) -> None:
        kept = {
            namespace: {length: left for length, encodings in lengths.items() if (left := encodings & there)}
            for namespace, lengths in self._known.items()
        }
        self._known = {namespace: lengths for namespace, lengths in kept.items() if lengths}
        self._index.keep(there)
        self._num_known = sum(len(e) for lengths in self._known.values() for e in lengths.values())
