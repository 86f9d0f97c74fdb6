"""A vision tower in a process of its own, for CPUs: it yields the cores to the engine, and shares no lock with it."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from pathlib import Path

import msgspec
import torch

from runtime.errors import ModelError, RametError
from runtime.features.images.decoder import ignore_signals
from runtime.features.images.rules import Rules, load_rules
from runtime.features.images.tower import Tower
from runtime.models.process_pool import ProcessPool
from runtime.models.template_program import read_frame, write_frame

# By how much the process is nicer than the server: others' steps go first.
_YIELD = 10
# Timeout of one tile in seconds, most of which it may wait for cores.
_TILE_S = 600


class _Opening(msgspec.Struct, frozen=True):
    """What the process loads; `threads`: 0 for torch's default."""

    directory: str
    dtype: str
    is_random: bool
    threads: int


class _Tile(msgspec.Struct):
    """A uint8 tile [height, width, 3]; `size`: see `Tower.states`, (0, 0) for none, to load the tower."""

    pixels: bytes
    size: tuple[int, ...]


class _States(msgspec.Struct):
    """States [rows, hidden] in the tower's type, or why there are none."""

    states: bytes = b""
    rows: int = 0
    error: str | None = None


class TowerProcess:
    """A `Tower` on the CPU, in a process. Thread-safe. A process that has ended is started again."""

    def __init__(self, opening: _Opening):
        self._dtype = getattr(torch, opening.dtype)
        self._pool = ProcessPool("see images", ["-m", __name__, msgspec.json.encode(opening).decode()], read_frame)
        self._lock = threading.Lock()
        weakref.finalize(self, self._pool.close)  # at the latest when this process exits

    def open(self) -> None:
        """Load the tower. Raises ModelError."""
        try:
            self._ask(_Tile(b"", (0, 0)))
        except RametError as error:
            raise ModelError(error.message) from None

    def states(self, tile: bytes, size: tuple[int, ...]) -> torch.Tensor:
        """See `Tower.states`. Raises RametError."""
        found = self._ask(_Tile(tile, size))
        return torch.frombuffer(bytearray(found.states), dtype=self._dtype).view(found.rows, -1)

    def _ask(self, tile: _Tile) -> _States:
        data = msgspec.msgpack.encode(tile)
        with self._lock:
            answer = self._pool.ask(lambda tiles: write_frame(tiles, data), _TILE_S)
        if not answer:
            why = "has ended; it may lack memory" if answer is not None else f"takes longer than {_TILE_S} s for a tile"
            raise RametError(f"the process of the model's vision tower {why}")
        found = msgspec.msgpack.decode(answer, type=_States)
        if found.error is not None:
            raise ModelError(found.error)
        return found


# Those that an engine of this process has, by what they load.
_open: weakref.WeakValueDictionary[_Opening, TowerProcess] = weakref.WeakValueDictionary()
_opening_lock = threading.Lock()


def open_tower(
    directory: Path, rules: Rules, dtype: torch.dtype, device: torch.device, is_random: bool, threads: int | None
) -> Tower | TowerProcess:
    """A model's tower; on a CPU, one that all engines of this process share, and ends with them. Raises ModelError.

    Args:
        directory, rules, dtype, device, is_random: see `Tower`.
        threads: of a CPU; None: torch's default.
    """
    if device.type != "cpu":
        return Tower(directory, rules, dtype, device, is_random)
    opening = _Opening(str(directory), str(dtype).removeprefix("torch."), is_random, threads or 0)
    with _opening_lock:
        tower = _open.setdefault(opening, TowerProcess(opening))  # which starts no process yet
    tower.open()
    return tower


def _answer(opening: _Opening, towers: list[Tower], order: bytes) -> _States:
    try:
        tile, directory = msgspec.msgpack.decode(order, type=_Tile), Path(opening.directory)
        if not towers:
            rules = load_rules(directory)
            assert rules is not None
            dtype = getattr(torch, opening.dtype)
            towers.append(Tower(directory, rules, dtype, torch.device("cpu"), opening.is_random))
            os.nice(_YIELD)  # not before: the server's start waits for this
        if tile.size == (0, 0):
            return _States()
        states = towers[0].states(tile.pixels, tile.size)
        return _States(states.contiguous().view(torch.uint8).numpy().tobytes(), len(states))
    except Exception as error:  # of torch as well
        return _States(error=error.message if isinstance(error, RametError) else f"the vision tower failed: {error}")


def main(argument: str) -> None:
    """Answer the tiles on standard input, until it ends."""
    ignore_signals()
    opening, towers = msgspec.json.decode(argument, type=_Opening), list[Tower]()
    if opening.threads:
        torch.set_num_threads(opening.threads)
    write_frame(sys.stdout.buffer, b"r")
    while order := read_frame(sys.stdin.buffer):
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(_answer(opening, towers, order)))


if __name__ == "__main__":
    main(sys.argv[1])
