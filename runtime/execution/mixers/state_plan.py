"""How recurrent layers compute all sequences of a step together: index arrays, made once for all layers.

The *run* of a sequence is what it computes again, then its rows of the step. A run is cut into chunks: behind `CHUNK`
rows, and where a state is wanted. Chunks of several sequences are computed together in *waves*: first the first chunks
of all sequences, then the second ones.

Convolutions read a *tape*: for each sequence `width - 1` earlier inputs, then its run. Result i of a convolution is
that of the place i + width - 1 of the tape.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime.batch import MOST_DRAFTED, StateRows
from runtime.execution.transfers import upload

# Most rows of a chunk. The cost of a row grows with the rows of its chunk, and the number of waves falls.
CHUNK = 64
# Chunks are padded to one of these lengths. Sequences whose longest chunks have the same one are computed together.
_LENGTHS = (1, 4, 16, CHUNK)


@dataclass(slots=True)
class Write:
    """States to store: those of the sequences `which`, int64 [n]; None: of the first n. `slots`: int64 [n]."""

    which: torch.Tensor | None
    slots: torch.Tensor


@dataclass(slots=True)
class Chunks:
    """The chunks of sequences, of which those with more chunks come first.

    Attributes:
        slots: int64 [n], slots with the states before the first chunks.
        rows: int64 [chunks, length], results of the convolution, wave by wave.
        padding: bool [chunks, length], places without a row.
        waves: number of chunks of each wave; they belong to the first sequences.
        writes: what to store before the first wave, and behind each wave.
    """

    slots: torch.Tensor
    rows: torch.Tensor
    padding: torch.Tensor
    waves: list[int]
    writes: list[Write | None]


@dataclass(slots=True)
class StatePlan:
    """Tensors are int64, on the device of the states.

    Attributes:
        tape: [m], rows of the step by their number; those computed again come behind the last of these; any number for
            earlier inputs.
        earlier: the places of earlier inputs on the tape, sequence by sequence.
        first: [n], slots with the states before the runs.
        ends, slots: [w, width - 1] and [w], for each state to store, its last places on the tape, and its slot.
        rows: [T], the convolution's result for each row of the step.
        again: [R], records to compute again, numbered through all slots.
        guesses, records: [g], rows that are guesses, and where their records go, numbered as `again`.
        outputs: [T], the place of each row of the step among the places of all chunks, group by group.
    """

    tape: torch.Tensor
    earlier: torch.Tensor
    first: torch.Tensor
    ends: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    again: torch.Tensor
    guesses: torch.Tensor
    records: torch.Tensor
    outputs: torch.Tensor
    groups: list[Chunks]


class _Run:
    """A run.

    Attributes:
        one: the sequence.
        chunks: the convolution's results for their first rows, and lengths.
        length: to which chunks are padded.
        writes: a number of chunks, the row behind them, and a slot for the state there.
    """

    def __init__(self, one: StateRows, start: int):
        """`start`: the convolution's result for the first row of the run."""
        self.one = one
        self.chunks: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int, int]] = []
        at, offset = start, start + one.accepted - one.first
        wanted = [(row + 1, slot) for row, slot in one.saves] + [(one.stop - one.draft, one.target)]
        for row, slot in [*sorted(wanted), (one.stop, -1)]:
            stop = row + offset
            self.chunks += [(begin, min(CHUNK, stop - begin)) for begin in range(at, stop, CHUNK)]
            at = stop
            if slot >= 0:
                self.writes.append((len(self.chunks), stop, slot))
        longest = max(length for _, length in self.chunks)
        self.length = next(length for length in _LENGTHS if length >= longest)


def plan_states(states: Sequence[StateRows], width: int, device: torch.device) -> StatePlan:
    """Plan a step.

    Args:
        states: all rows of the step, in their order.
        width: of the convolutions.
        device: of the states.
    """
    total, before = states[-1].stop, width - 1
    first, stop, again = np.array([(one.first, one.stop, one.accepted) for one in states]).T
    lengths = again + stop - first
    # The convolution's results for the first rows of the runs, and for all rows of the step.
    starts = np.cumsum(lengths + before) - lengths - before
    rows = np.arange(total) + np.repeat(starts + again - first, stop - first)
    tape = np.zeros(starts[-1] + lengths[-1] + before, dtype=np.int64)
    tape[rows + before] = np.arange(total)
    repeats = [(i, one.slot * MOST_DRAFTED + i) for one in states for i in range(one.accepted)]
    within = np.array([i for i, _ in repeats], dtype=np.int64)
    tape[np.repeat(starts, again) + within + before] = total + np.arange(len(repeats))
    guesses = [(one.stop - one.draft + i, one.target * MOST_DRAFTED + i) for one in states for i in range(one.draft)]
    runs = [_Run(one, start) for one, start in zip(states, starts.tolist(), strict=True)]
    writes = [write for run in runs for write in run.writes]
    grids = [_Grid(group) for length in _LENGTHS if (group := [run for run in runs if run.length == length])]
    place_of_result, at = np.zeros(len(tape), dtype=np.int64), 0
    for grid in grids:
        place_of_result[grid.rows[~grid.padding]] = at + np.flatnonzero(~grid.padding)
        at += grid.rows.size
    arrays: dict[str, Sequence[int] | np.ndarray] = {
        "tape": tape,
        "earlier": (starts[:, None] + np.arange(before)).ravel(),
        "first": [one.slot for one in states],
        "ends": np.array([stop for _, stop, _ in writes])[:, None] + np.arange(before),
        "slots": [slot for _, _, slot in writes],
        "rows": rows,
        "again": [record for _, record in repeats],
        "guesses": [row for row, _ in guesses],
        "records": [record for _, record in guesses],
        "outputs": place_of_result[rows],
    }
    on_device = _upload([*arrays.values(), *(array for grid in grids for array in grid.arrays())], device)
    named = {name: next(on_device) for name in arrays}
    return StatePlan(**named, groups=[grid.chunks(on_device) for grid in grids])


class _Grid:
    """The chunks of runs with the same length, on the host; see `Chunks`."""

    def __init__(self, runs: list[_Run]):
        runs.sort(key=lambda run: -len(run.chunks))
        self._slots = [run.one.slot for run in runs]
        most = len(runs[0].chunks)
        waves = [[run.chunks[wave] for run in runs if wave < len(run.chunks)] for wave in range(most)]
        self._waves = [len(wave) for wave in waves]
        starts, lengths = np.array([chunk for wave in waves for chunk in wave]).T
        within = np.arange(runs[0].length)
        self.padding = within >= lengths[:, None]
        self.rows = np.where(self.padding, starts[:, None], starts[:, None] + within)
        self._writes: list[list[tuple[int, int]]] = [[] for _ in range(most + 1)]
        for number, run in enumerate(runs):
            for count, _, slot in run.writes:
                self._writes[count].append((number, slot))

    def arrays(self) -> Iterator[Sequence[int] | np.ndarray]:
        """What `chunks` needs on the device."""
        yield from (self._slots, self.rows, self.padding)
        for write in self._writes:
            yield from zip(*write, strict=True)

    def chunks(self, arrays: Iterator[torch.Tensor]) -> Chunks:
        """`arrays`: those of `arrays`, on the device."""
        slots, rows, padding = (next(arrays) for _ in range(3))
        writes: list[Write | None] = []
        for write in self._writes:
            which, to = (next(arrays), next(arrays)) if write else (None, None)
            is_first = [number for number, _ in write] == [*range(len(write))]
            writes.append(None if to is None else Write(None if is_first else which, to))
        return Chunks(slots, rows, padding.bool(), self._waves, writes)


def _upload(arrays: Sequence[Sequence[int] | np.ndarray], device: torch.device) -> Iterator[torch.Tensor]:
    """The arrays as int64 tensors on `device`, in one transfer."""
    whole = [np.asarray(array, dtype=np.int64) for array in arrays]
    flat = upload(torch.from_numpy(np.concatenate([array.ravel() for array in whole])), device)
    parts = flat.split([array.size for array in whole])
    return (part.view(array.shape) for part, array in zip(parts, whole, strict=True))
