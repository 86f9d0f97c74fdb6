"""What the tower has made of tiles."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch
from cachetools import LRUCache

from radix import Namespace
from runtime.features.images.decoder import Decoded
from runtime.features.images.decoding import PROCESSES, DecodeOrder
from runtime.features.images.rules import Rules
from runtime.features.images.tower import Tower
from runtime.features.images.tower_process import TowerProcess

# Bytes of states that are kept beside those of live requests, and of pixels of images of which tiles are computed.
_MOST_BYTES = _MOST_PIXELS = 256 << 20

# A tile of a namespace: the tokens of its rows.
Key = tuple[Namespace, bytes]

K = TypeVar("K")
V = TypeVar("V")


class States:
    """The states of tiles by their tokens, which are a digest of their pixels; those of a namespace are its own.

    Attributes:
        rules: how the model sees.
        calls: number of tiles that the tower has computed.
    """

    def __init__(self, rules: Rules, tower: Tower | TowerProcess):
        self.rules, self._tower = rules, tower
        self._kept: LRUCache[Key, torch.Tensor] = LRUCache(_MOST_BYTES, getsizeof=lambda states: states.nbytes)
        self._decoded: LRUCache[tuple[Namespace, bytes], Decoded] = LRUCache(
            _MOST_PIXELS, getsizeof=lambda decoded: sum(map(len, decoded.tiles))
        )
        self._lock = threading.Lock()
        self._erased = 0
        self.calls = 0

    def get(self, key: Key) -> torch.Tensor | None:
        with self._lock:
            return self._kept.get(key)

    def compute(self, key: Key, file: bytes, tile: int) -> torch.Tensor:
        """The states [rows, hidden] of a tile of an image, by its index. Raises InvalidRequest."""
        if (states := self.get(key)) is None:
            image, erased = (key[0], file), self._erased
            decoded = self._once(
                self._decoded, image, lambda: PROCESSES.decode(DecodeOrder(self.rules, file, pixels=True)), erased
            )
            states = self._once(
                self._kept, key, lambda: self._tower.states(decoded.tiles[tile], decoded.sizes[tile]), erased
            )
            self.calls += 1
        return states

    def _once(self, cache: LRUCache[K, V], key: K, make: Callable[[], V], erased: int) -> V:
        """What a cache has, or `make` makes; it is kept if nothing was erased since there were `erased` erasures."""
        with self._lock:
            found = cache.get(key)
        if found is None:
            found = make()
            with self._lock, suppress(ValueError):  # it may be larger than the cache
                if erased == self._erased:
                    cache[key] = found
        return found

    def forget_pixels(self) -> None:
        """Forget the pixels of images, of which no tile is wanted for now."""
        with self._lock:
            self._decoded.clear()

    def erase(self) -> None:
        """Forget all states, and the pixels that idle processes may still have."""
        self.forget_pixels()
        with self._lock:
            self._erased += 1
            self._kept.clear()
        PROCESSES.forget()
