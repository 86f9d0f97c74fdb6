"""Encoded prefixes of bidirectional models in the tree, each in a namespace of its own."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

from radix import Match, Namespace, path
from radix.node import TOKEN_BYTES
from runtime.engine.denoise_request import DenoiseRequest
from runtime.kv.cache import PagedCache
from runtime.reuse.bicache.encoding_index import EncodedIndex
from runtime.reuse.bicache.shallow_meta import ShallowMeta, meet_all

_KIND = "bicache"
# Encodings that are remembered beyond those that the tree has, before those are looked up that it lost.
_SLACK = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of an encoded prefix.

    Attributes:
        encoding: its namespace in the tree.
        length: tokens of the beginning.
        encoded: tokens that were encoded together.
    """

    encoding: Namespace | None
    length: int
    encoded: int


class Encodings:
    """Finds, books and inserts encoded prefixes.

    Under bidirectional attention the KV of every row depends on the whole prefix, so two prefixes may share no page,
    however alike they begin. The namespace of an encoding is the request's with a hash of all its tokens; within it
    the tree compares the tokens themselves. Tenants, pins and eviction see nodes like any other.
    """

    def __init__(self, cache: PagedCache):
        self.cache = cache
        self._known: dict[Namespace, dict[int, set[Namespace]]] = {}
        self._num_known = 0
        self._index = EncodedIndex()

    @staticmethod
    def namespace(base: Namespace, key: bytes) -> Namespace:
        """Where the encoding of a prefix lies."""
        return base.for_entry(_KIND, hashlib.blake2b(key, digest_size=16).hexdigest())

    def match(self, key: bytes, encoding: Namespace) -> Match | None:
        """The pages of a whole encoding; None if some of it is missing."""
        found = self.cache.tree.match(key, encoding)
        whole = len(found.pages) * self.cache.page_size * TOKEN_BYTES == len(key)
        return found if whole and found.pages else None

    def discover(self, tokens: array[int], base: Namespace, limit: int) -> int:
        """Tokens of the longest encoded prefix of `tokens[:limit]`; 0 if there is none."""
        known = self._known.get(base, {})
        hashed, at, found = hashlib.blake2b(digest_size=16), 0, []
        for length in sorted(known):
            if length > limit:
                break
            hashed.update(tokens[at:length].tobytes())
            at = length
            encoding = base.for_entry(_KIND, hashed.hexdigest())
            if encoding in known[length]:
                found.append((length, encoding))
        for length, encoding in reversed(found):
            if self.match(tokens[:length].tobytes(), encoding):
                return length
            known[length].discard(encoding)
            self._num_known -= 1
        return 0

    def part(self, tokens: array[int], base: Namespace, limit: int) -> Part | None:
        """The encoding of which `tokens[:limit]` has most whole pages in the tree; None if there is no page."""
        key, best = tokens[:limit].tobytes(), None
        for whole, encoding in self._index.neighbours(base, key):
            found = self.cache.tree.match(key, encoding)
            meta = meet_all(found.node)
            length = len(found.pages) * self.cache.page_size
            if meta is None:
                if not self.cache.tree.match(whole, encoding).pages:
                    self._index.discard(base, whole, encoding)
            elif best is None or length > best.length:
                best = Part(encoding, length, meta.encoded_tokens)
        return best

    def admit(self, request: DenoiseRequest) -> bool:
        """Give a request the tree's pages of its prefix, if they are there, and private ones for the rest.

        Returns:
            False, with nothing changed, if memory does not suffice.
        """
        cache = self.cache
        match = self.match(request.key(request.prefix_len), request.encoding) if request.encoding else None
        node = cache.tree.lock_match(match) if match else None
        need = cache.pages_for(request.length) * request.num_canvases
        missing = cache.pages_for(request.prefix_len) if request.encoding and match is None else 0
        shared = match.pages if match else array("i")
        fresh = cache.allocate(missing + need, shared, request.namespace, cached=missing)
        if fresh is None:
            cache.tree.unlock(node)
            return False
        cache.tree.use(node)
        request.node, request.num_tree_pages = node, len(shared)
        request.pages = shared + fresh
        request.is_encoding = missing > 0
        return True

    def insert(self, request: DenoiseRequest, profile: str, similarity: tuple[float, ...] | None, cost: float) -> None:
        """Hand the prefix that a request has encoded to the tree, and lock it for the request.

        Where the tree still had some pages of this encoding, they stay: their KV is the same.
        """
        assert request.encoding is not None
        cache, count = self.cache, self.cache.pages_for(request.prefix_len)
        meta = ShallowMeta(request.prefix_len, profile, similarity)
        key = request.key(request.prefix_len)
        node, held = cache.tree.insert(key, request.pages[:count], request.encoding, cost, meta)
        twice = [mine for mine, theirs in zip(request.pages, held, strict=False) if mine != theirs]
        request.pages[:count] = held
        cache.allocator.release(twice)
        cache.tree.lock(node)
        request.node, request.num_tree_pages = node, count
        request.is_encoding = False
        self._remember(request, request.encoding)

    def forget(self, request: DenoiseRequest) -> None:
        """Drop the encoding that a request shared, unless it is pinned or another live request reads it."""
        if not request.encoding:
            return
        found = self.cache.tree.match(request.key(request.prefix_len), request.encoding)
        for top in list(path(found.node))[-1:]:
            self.cache.drop(top)

    def _remember(self, request: DenoiseRequest, encoding: Namespace) -> None:
        lengths = self._known.setdefault(request.namespace, {})
        encodings = lengths.setdefault(request.prefix_len, set())
        self._num_known += encoding not in encodings
        encodings.add(encoding)
        self._index.add(request.namespace, request.key(request.prefix_len), encoding)
        there = {namespace for namespace, _ in self.cache.tree.roots()} if self._is_full() else None
        if there is not None:
            self._forget(there)

    def _is_full(self) -> bool:
        return self._num_known > 2 * self.cache.tree.num_nodes + _SLACK

    def _forget(self, there: set[Namespace]) -> None:
        """Forget the encodings that the tree has lost."""
        kept = {
            base: {length: left for length, encodings in lengths.items() if (left := encodings & there)}
            for base, lengths in self._known.items()
        }
        self._known = {base: lengths for base, lengths in kept.items() if lengths}
        self._index.keep(there)
        self._num_known = sum(len(e) for lengths in self._known.values() for e in lengths.values())
