"""The tiles that a request waits for: the tower computes them one at a time, in turn with those of others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple

import torch

from runtime.fair_threads import FairThreads
from runtime.features.images.states import Key, States


class Tile(NamedTuple):
    """A tile to compute: an image, and the index of the tile in it."""

    key: Key
    file: bytes
    number: int


class Job:
    """The tiles of a request. Each takes a turn: accounts take turns, and so do the requests of an account.

    Attributes:
        found: states by their tiles.
        error: why the tower has stopped; None: it has not.
        is_done: whether all tiles are there, or there is an error.
        is_over: set it to have no further tile computed.
    """

    def __init__(self, account: str, tiles: Iterable[Tile], states: States, threads: FairThreads):
        self._account, self._left, self._states, self._threads = account, deque(tiles), states, threads
        self.found: dict[Key, torch.Tensor] = {}
        self.error: Exception | None = None
        self.is_done = self.is_over = False
        self._queue()

    def _queue(self) -> None:
        self._threads.submit(self._account, self._take).add_done_callback(self._ended)

    def _ended(self, piece: Future[None]) -> None:
        if not piece.cancelled() and isinstance(error := piece.exception(), Exception):  # it could not be started
            self.error, self.is_done = error, True

    def _take(self) -> None:
        """Compute a tile, and queue behind the others for the next one."""
        if self.is_over:
            self._states.forget_pixels()  # of this image, and of others, which are decoded again
            return
        tile = self._left.popleft()
        try:
            self.found[tile.key] = self._states.compute(*tile)
        except Exception as error:
            self.error = error
        self.is_done = self.error is not None or not self._left
        if self.is_over or not self.is_done:
            self._queue()
