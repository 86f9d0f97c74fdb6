"""The images of live requests in the engine: which tiles the tower computes, and which rows get their states."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from cachetools import LRUCache

from radix import Namespace
from runtime.engine.part import Part
from runtime.features.images.ask import ImagesAsk, TileRun
from runtime.features.images.decoding import PROCESSES, Order
from runtime.features.images.rules import Rules
from runtime.features.images.tower import Tower
from runtime.features.images.tower_process import TowerProcess
from runtime.protocol import Finish, TokenEvent
from runtime.request import Request

if TYPE_CHECKING:
    from runtime.engine.core import EngineCore

# Bytes of states that are kept beside those of live requests.
_MOST_BYTES = 256 << 20

# A tile of a tenant: the tokens of its rows.
Key = tuple[Namespace, bytes]


class States:
    """The states of tiles by their tokens, which are a digest of their pixels; those of a tenant are its own.

    Attributes:
        rules: how the model sees.
        calls: number of tiles that the tower has computed.
    """

    def __init__(self, rules: Rules, tower: Tower | TowerProcess):
        self.rules, self._tower = rules, tower
        self._kept: LRUCache[Key, torch.Tensor] = LRUCache(_MOST_BYTES, getsizeof=lambda states: states.nbytes)
        self._lock = threading.Lock()
        self.calls = 0

    def get(self, key: Key) -> torch.Tensor | None:
        with self._lock:
            return self._kept.get(key)

    def compute(
        self, file: bytes, tiles: Mapping[int, Key], is_over: Callable[[], bool] = lambda: False
    ) -> dict[Key, torch.Tensor]:
        """The states float32 [rows, hidden] of some tiles of an image, by their indices.

        Raises InvalidRequest, and CancelledError as soon as `is_over`, between two tiles.
        """
        found = {key: states for key in tiles.values() if (states := self.get(key)) is not None}
        missing = {i: key for i, key in tiles.items() if key not in found}
        if missing:
            decoded = PROCESSES.decode(Order(self.rules, file, pixels=True))
            for i, key in missing.items():
                if is_over():
                    raise CancelledError
                found[key] = self._tower.states(decoded.tiles[i], decoded.sizes[i])
                self.calls += 1
                with self._lock:
                    if found[key].nbytes <= _MOST_BYTES:
                        self._kept[key] = found[key]
        return found

    def erase(self) -> None:
        """Forget all states, and the pixels that idle processes may still have."""
        with self._lock:
            self._kept.clear()
        PROCESSES.forget()


class ImageRows:
    """The rows of a request that are images; see `GivenRows`.

    Attributes:
        held: states by their tiles.
        is_over: whether the request has ended.
    """

    def __init__(self, request: Request, asked: ImagesAsk, states: States):
        self._asked, self._states, self._sequence = asked, states, request.sequence
        owner, tokens = request.owner, request.tokens
        self._runs: list[tuple[TileRun, Key]] = [
            (run, (owner, tokens[run.start : run.stop].tobytes())) for run in asked.runs
        ]
        self._rows = np.frombuffer(tokens, np.int32) < 0
        self._mutual = [(run.start, run.stop) for run in asked.runs] if states.rules.mutual else []
        self.held: dict[Key, torch.Tensor] = {}
        self.is_over = False
        if states.rules.has_axes:
            self._anchor()

    def _anchor(self) -> None:
        """Let the positions behind an image go on behind the longer edge of its grid."""
        for run in self._asked.runs:
            height = (run.stop - run.start) // run.width
            behind = self._sequence.position(run.start) + max(height, run.width)
            self._sequence.anchors.append((run.stop, behind))

    @property
    def stop(self) -> int:
        """End of the last run."""
        return self._runs[-1][0].stop

    def missing(self, first: int, stop: int | None = None) -> dict[int, dict[int, Key]]:
        """The tiles with rows from `first` up to `stop` whose states are not there: by file, by index in it."""
        found: dict[int, dict[int, Key]] = {}
        for run, key in self._runs:
            if run.stop <= first or (stop is not None and run.start >= stop) or key in self.held:
                continue
            if (states := self._states.get(key)) is not None:
                self.held[key] = states
            else:
                found.setdefault(run.file, {})[run.tile] = key
        return found

    def compute(self, missing: Mapping[int, Mapping[int, Key]]) -> dict[Key, torch.Tensor]:
        """The states of missing tiles."""
        found: dict[Key, torch.Tensor] = {}
        for file, tiles in missing.items():
            found |= self._states.compute(self._asked.files[file], tiles, lambda: self.is_over)
        return found

    def load(self, first: int, stop: int) -> tuple[np.ndarray, torch.Tensor] | None:
        if first >= self.stop:  # as in all steps behind the prompt
            return None
        within = [(run, key) for run, key in self._runs if run.start < stop and run.stop > first]
        if not within:
            return None
        if missing := self.missing(first, stop):  # it was retracted, or what it was to read has been evicted
            self.held |= self.compute(missing)
        rows, states = [], []
        for run, key in within:
            places = np.flatnonzero(self._rows[run.start : run.stop]) + run.start
            wanted = (places >= first) & (places < stop)
            rows.append(places[wanted] - first)
            states.append(self.held[key][torch.from_numpy(wanted)])
        return np.concatenate(rows), torch.cat(states)

    def axes(self, first: int, stop: int) -> np.ndarray | None:
        if first >= self.stop or not self._states.rules.has_axes:
            return None
        within = [run for run in self._asked.runs if run.start < stop and run.stop > first]
        if not within:
            return None
        axes = self._sequence.positions(first, stop)[:, None].repeat(3, 1)
        for run in within:
            rows = np.arange(max(first, run.start), min(stop, run.stop))
            grid = np.stack(np.divmod(rows - run.start, run.width), 1)
            axes[rows - first] = self._sequence.position(run.start) + np.pad(grid, ((0, 0), (1, 0)))
        return axes

    def cut(self, place: int) -> tuple[int, int]:
        i = bisect_left(self._mutual, (place,)) - 1
        return self._mutual[i] if i >= 0 and place < self._mutual[i][1] else (place, place)

    def seen(self, first: int, stop: int) -> np.ndarray | None:
        if first >= self.stop or not self._mutual:
            return None
        within = [run for run in self._mutual if run[0] < stop and run[1] > first]
        seen = np.arange(first + 1, stop + 1, dtype=np.int32)
        for start, end in within:
            seen[start - first : end - first] = end
        return seen


class ImagesPart(Part):
    """Computes the images of new requests in a thread; the requests wait for it."""

    def __init__(self, core: EngineCore, states: States):
        self._core, self._states = core, states
        self._threads = ThreadPoolExecutor(1, "ramet-images")
        self._open: dict[str, Future[dict[Key, torch.Tensor]]] = {}
        self._requests = 0

    def added(self, request: Request) -> None:
        asked = request.message.images
        if asked is not None and asked.runs:
            request.given = ImageRows(request, asked, self._states)
            self._requests += 1

    def blocked_on(self, request: Request) -> tuple[str, str] | None:
        """Wait for the tiles that are not in the tree, and start to compute those whose states are not there."""
        rows = request.given
        if not isinstance(rows, ImageRows):
            return None
        missing = rows.missing(request.lease.look().tokens)
        if not missing:
            return None
        if request.rid not in self._open:
            self._open[request.rid] = self._threads.submit(rows.compute, missing)
        return "images of", request.rid

    def poll(self, step_s: float) -> Sequence[TokenEvent]:
        failed = []
        for rid in [rid for rid, future in self._open.items() if future.done()]:
            future, request = self._open.pop(rid), self._core.requests[rid]
            assert isinstance(request.given, ImageRows)
            try:
                request.given.held |= future.result()
            except Exception as error:
                failed.append(self._core.fail(request, error))
            else:
                self._core.scheduler.wake(("images of", rid))
        return failed

    def prefilled(self, request: Request) -> None:
        if isinstance(request.given, ImageRows) and request.sequence.num_computed >= request.given.stop:
            request.given.held.clear()

    def ended(self, request: Request, finish: Finish) -> None:
        if (future := self._open.pop(request.rid, None)) is not None:
            future.cancel()
        if isinstance(request.given, ImageRows):
            request.given.is_over = True

    def flush(self) -> None:  # also called when a tenant is erased
        self._states.erase()

    def state(self) -> Mapping[str, Any]:
        return {"image_requests": self._requests, "image_tiles": self._states.calls}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
