"""An entry that a request is encoding, because nobody has computed it yet."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from runtime.batch import Read, RowSet, Stage
from runtime.features.chunks.entry import Entry
from runtime.kv.segments import Segment, slots_of

_NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class Encoding:
    """The state of an encoding.

    Attributes:
        at: index of the next row to encode; the rows before it have KV in `pages` and `scratch`.
        pages: int32 page ids of the kept rows; pages that the tree had already come first.
        scratch: int32 page ids of the placeholder rows, freed when the entry is complete.
        held: segments that keep these pages allocated or locked during the encoding.
        seconds: compute time so far.
    """

    entry: Entry
    at: int
    pages: array[int]
    scratch: array[int]
    held: list[Segment]
    seconds: float = 0.0

    @property
    def left(self) -> int:
        """Number of rows that still have to be encoded."""
        return len(self.entry.is_kept) - self.at

    def rows(self, count: int, page_size: int, num_layers: int) -> RowSet:
        """The next `count` rows, with causal attention among the entry's rows, placeholders included."""
        entry, first, stop = self.entry, self.at, self.at + count
        kept, num_kept = entry.is_kept[first:stop], entry.num_kept[first:stop]
        num_holes = np.arange(first + 1, stop + 1, dtype=np.int32) - num_kept
        writes, reads = np.empty(count, dtype=np.int64), []
        for mine, pages, seen in ((kept, self.pages, num_kept), (~kept, self.scratch, num_holes)):
            writes[mine] = slots_of(pages, seen[mine].astype(np.int64) - 1, page_size)
            if seen[-1]:
                reads.append(_see(pages, seen, page_size))
        return RowSet(
            tokens=np.array(entry.sequence.tokens[first:stop], dtype=np.int64),
            positions=entry.sequence.positions(first, stop),
            stages=[Stage(range(num_layers), writes, reads)],
            logits=_NO_ROWS,
        )


def _see(pages: array[int], seen: np.ndarray, page_size: int) -> Read:
    """A read of the first rows in `pages`. `seen`: int32 [n], ascending, how many rows each query row sees."""
    length, blind = int(seen[-1]), int(np.searchsorted(seen, 1))
    table = np.frombuffer(pages, dtype=np.int32)[: -(-length // page_size)]
    visible = seen[blind:] if len(seen) - blind > 1 else None
    return Read(table, length, visible=visible, rows=slice(blind, None) if blind else None)
