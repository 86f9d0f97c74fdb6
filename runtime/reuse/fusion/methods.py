"""Fusion methods: which document rows are computed again."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch

from runtime.reuse.fusion.layout import Layout
from runtime.reuse.fusion.looks import DenseLook, Look, QuestionLook, smooth

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


class A3(Scored):
    """A3 (attention-aware fusion): the rows to which the question attends in layer 1.

    One softmax over the concatenated heads for each row of the question, summed, and smoothed over neighbours.
    """

    name = "a3"
    look = DenseLook

    def scores(self, look: Look | None) -> torch.Tensor:
        assert isinstance(look, DenseLook)
        candidates, queries = self.layout.candidates, look.queries()
        question = np.arange(self.layout.question, len(self.layout.prompt))
        keys = look.true(look.executor.pool.k, np.concatenate((candidates, question)))
        grouped = queries.unflatten(1, (keys.shape[1], -1)).sum(2)  # as if each key stood beside its several queries
        logits = grouped.flatten(1) @ keys.flatten(1).T / math.sqrt(queries[0].numel())
        later = torch.ones(len(question), len(question), dtype=torch.bool, device=logits.device).triu(1)
        logits[:, len(candidates) :].masked_fill_(later, -torch.inf)
        summed = logits.softmax(dim=-1)[:, : len(candidates)].sum(0)
        return smooth(summed)


class CacheBlend(Scored):
    """CacheBlend (Yao et al. 2024): the rows whose values in layer 1 differ most, squared, from the stored ones."""

    name = "cacheblend"
    look = DenseLook

    def scores(self, look: Look | None) -> torch.Tensor:
        assert isinstance(look, DenseLook)
        candidates = self.layout.candidates
        true = look.true(look.executor.pool.v, candidates)
        return (true - look.stored_values(candidates)).square().sum((1, 2))


class ProphetKV(Scored):
    """After ProphetKV: the rows to which the question attends, on average over some layers, behind the stored rows."""

    name = "prophetkv"
    look = QuestionLook

    def scores(self, look: Look | None) -> torch.Tensor:
        assert isinstance(look, QuestionLook)
        return look.scores()


class LegoLink(Method):
    """LegoLink-k (EPIC, Hu et al. 2024): the first rows of each chunk, which draw attention as the prompt's first do.

    `asked.k` rows of each, or with a ratio this share of it. A chunk that begins the prompt has none.
    """

    name = "legolink"

    def choose(self, look: Look | None) -> np.ndarray:
        layout, asked = self.layout, self.layout.asked
        chosen = np.zeros(len(layout.prompt), dtype=bool)
        for place in layout.places:
            if not place.is_document or not place.start:
                continue
            k = asked.k if asked.ratio is None else math.ceil(asked.ratio * place.entry.length)
            if asked.granularity == "page":
                k = -(-k // layout.page_size) * layout.page_size
            chosen[place.start : place.start + min(k, place.entry.length)] = True
        return layout.candidates[chosen[layout.candidates]]


class Pie(Method):
    """PIE (positional integrity encoding, He et al. 2024): rows of documents are moved, and none is computed again."""

    name = "pie"

    def choose(self, look: Look | None) -> np.ndarray:
        return self.layout.candidates[:0]


class Full(Pie):
    """Full reuse, the baseline of the papers: of the question, the last row alone is computed."""

    name = "full"
    reuses_question = True


METHODS: dict[str, type[Method]] = {method.name: method for method in (A3, CacheBlend, ProphetKV, LegoLink, Pie, Full)}
