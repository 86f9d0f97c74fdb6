"""The images of live requests in the engine: which tiles the tower computes, and which rows get their states."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from runtime.calls import State
from runtime.engine.part import Part
from runtime.fair_threads import FairThreads
from runtime.features.images.ask import ImagesAsk, TileRun
from runtime.features.images.job import Job, Tile
from runtime.features.images.states import Key, States
from runtime.protocol import Finish, TokenEvent
from runtime.request import Request

if TYPE_CHECKING:
    from runtime.engine.core import EngineCore


class ImageRows:
    """The rows of a request that are images; see `GivenRows`.

    Attributes:
        held: states by their tiles.
    """

    def __init__(self, request: Request, asked: ImagesAsk, states: States):
        self._asked, self._states, self._sequence = asked, states, request.sequence
        space, tokens = request.message.namespace, request.tokens
        self._runs: list[tuple[TileRun, Key]] = [
            (run, (space, tokens[run.start : run.stop].tobytes())) for run in asked.runs
        ]
        self._rows = np.frombuffer(tokens, np.int32) < 0
        self._mutual = [(run.start, run.stop) for run in asked.runs] if states.rules.mutual else []
        self.held: dict[Key, torch.Tensor] = {}
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

    def missing(self, first: int) -> dict[Key, Tile]:
        """The tiles with rows from `first` on whose states are not there."""
        found: dict[Key, Tile] = {}
        for run, key in self._runs:
            if run.stop <= first or key in self.held:
                continue
            if (states := self._states.get(key)) is not None:
                self.held[key] = states
            else:
                found.setdefault(key, Tile(key, self._asked.files[run.file], run.tile))
        return found

    def is_ready(self, first: int) -> bool:
        return first >= self.stop or not self.missing(first)

    def load(self, first: int, stop: int) -> Sequence[tuple[np.ndarray, torch.Tensor]]:
        if first >= self.stop:  # as in all steps behind the prompt
            return ()
        within = [(run, key) for run, key in self._runs if run.start < stop and run.stop > first]
        if not within:
            return ()
        rows, states = [], []
        for run, key in within:
            places = np.flatnonzero(self._rows[run.start : run.stop]) + run.start
            wanted = (places >= first) & (places < stop)
            rows.append(places[wanted] - first)
            states.append(self.held[key][torch.from_numpy(wanted)])
        places = np.concatenate(rows)
        return [(places, one.contiguous()) for one in torch.cat(states).float().chunk(1 + self._states.rules.added, 1)]

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
    """Has the tower compute the images of new requests, which wait for it."""

    def __init__(self, core: EngineCore, states: States):
        self._core, self._states = core, states
        self._threads = FairThreads(1, "ramet-images")
        self._open: dict[str, Job] = {}

    def added(self, request: Request) -> None:
        asked = request.message.images
        if asked is not None and asked.runs:
            request.given = ImageRows(request, asked, self._states)

    def blocked_on(self, request: Request) -> tuple[str, str] | None:
        """Wait for the tiles that are not in the tree, and start to compute those whose states are not there."""
        rows = request.given
        if not isinstance(rows, ImageRows):
            return None
        missing = rows.missing(request.lease.look().tokens)
        if not missing:
            return None
        if request.rid not in self._open:
            self._open[request.rid] = Job(request.message.account, missing.values(), self._states, self._threads)
        return "images of", request.rid

    def poll(self, step_s: float) -> Sequence[TokenEvent]:
        failed = []
        for rid in [rid for rid, job in self._open.items() if job.is_done]:
            job, request = self._open.pop(rid), self._core.requests[rid]
            assert isinstance(request.given, ImageRows)
            if job.error is not None:
                failed.append(self._core.fail(request, job.error))
            else:
                request.given.held |= job.found
                self._core.scheduler.wake(("images of", rid))
        if not self._open:
            self._states.forget_pixels()
        return failed

    def prefilled(self, request: Request) -> None:
        if isinstance(request.given, ImageRows) and request.sequence.num_computed >= request.given.stop:
            request.given.held.clear()

    def ended(self, request: Request, finish: Finish) -> None:
        if (job := self._open.pop(request.rid, None)) is not None:
            job.is_over = True
            if not self._open:
                self._states.forget_pixels()

    def flush(self) -> None:  # also called when a tenant is erased
        self._states.erase()

    def report(self, state: State) -> None:
        state.figures["image_tiles"] = self._states.calls

    def close(self) -> None:
        self._threads.close()
