"""The interface of a fusion method: the choice of document rows that are computed again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch

from runtime.reuse.fusion.layout import Layout
from runtime.reuse.fusion.looks import Look

RATIO = 0.15


class Method(ABC):
    """Chooses rows, all at once, after a look at the prompt if it takes one.

    Attributes:
        name: by which requests ask for it.
        look: the pass before the choice; None: the choice needs none.
        reuses_question: whether the rows behind the last document are an entry, too, but for the last one.
    """

    name: ClassVar[str]
    look: ClassVar[type[Look] | None] = None
    reuses_question: ClassVar[bool] = False

    def __init__(self, layout: Layout):
        self.layout = layout

    def count(self) -> int:
        """The number of document rows that are chosen at most, behind a look."""
        ratio = self.layout.asked.ratio
        return int(len(self.layout.candidates) * (RATIO if ratio is None else ratio))

    @abstractmethod
    def choose(self, look: Look | None) -> np.ndarray:
        """Rows of the prompt, int64 ascending; none but `layout.candidates`."""


class Scored(Method):
    """Methods that give each row a score; that of a page is the sum of its rows'. The best are chosen."""

    def choose(self, look: Look | None) -> np.ndarray:
        layout, count = self.layout, self.count()
        runs = np.arange(len(layout.candidates)) if layout.asked.granularity == "token" else layout.pages
        sizes = np.bincount(runs)
        taken = np.zeros(len(sizes), dtype=bool)
        scores = np.bincount(runs, weights=self.scores(look).double().cpu().numpy())
        for run in np.argsort(-scores, kind="stable"):
            if sizes[run] <= count:
                taken[run] = True
                count -= sizes[run]
        return layout.candidates[taken[runs]]

    @abstractmethod
    def scores(self, look: Look | None) -> torch.Tensor:
        """float [candidates]."""
