"""The state of a request that reads documents, and the phases that it goes through."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from radix import Namespace
from runtime.kv.segments import Segment
from runtime.reuse.entries.strategy import Imports
from runtime.reuse.fusion.layout import Layout
from runtime.reuse.fusion.looks import Look
from runtime.reuse.fusion.methods import Method

_NO_ROWS = np.zeros(0, dtype=np.int64)


class Phase(Enum):
    """What a running request computes now; the phases follow each other in this order.

    ENCODE: chunks that are missing, and whole pages before the first document.
    LOOK: the pass before rows are chosen. Its end chooses them.
    FUSE: own and chosen rows, up to the end of the prompt for which rows were chosen.
    DECODE: all rows behind these; the rest of a later turn's prompt, and output.
    """

    ENCODE = auto()
    LOOK = auto()
    FUSE = auto()
    DECODE = auto()


@dataclass(slots=True, kw_only=True)
class Fused(Imports):
    """A request that reads documents.

    Attributes:
        namespace: of the request, before it was that of its own rows.
        phase: of a running request.
        selected: int64, the document rows that are computed again, ascending; None: that is not known yet.
        selected_for: leading tokens of the prompt for which they were chosen, before later turns.
        num_fused: rows of the sequence up to there.
        look: the pass before rows are chosen; a `DenseLook` until they are fused.
        held: its pages, and pages for the rows to be chosen.
    """

    layout: Layout
    method: Method
    namespace: Namespace
    phase: Phase = Phase.ENCODE
    selected: np.ndarray | None = None
    selected_for: int = 0
    num_fused: int = 0
    look: Look | None = None
    held: list[Segment] = field(default_factory=list)

    @property
    def chosen(self) -> np.ndarray:
        """`selected`, none as long as that is not known."""
        return _NO_ROWS if self.selected is None else self.selected
