"""Methods choose the rows of chunks that are computed again."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch

from runtime.features.chunks.ask import RATIO
from runtime.features.chunks.layout import Layout
from runtime.features.chunks.looks import DenseLook, Look, QuestionLook, smooth

# First rows of each chunk that Passages takes before all others if chunks are encoded alone: they are attention sinks.
_SINKS = 4


class Method(ABC):
    """Chooses all rows at once, after a look if the method needs one.

    Attributes:
        name: the method's name in requests.
        look: the pass before the choice; None: the method chooses from the layout alone.
        reuses_question: whether the question, except for its last row, is encoded alone and reused, too.
        reads_all: whether a row reads all chunks, those at later positions as well.
    """

    name: ClassVar[str]
    look: ClassVar[type[Look] | None] = None
    reuses_question: ClassVar[bool] = False
    reads_all: ClassVar[bool] = False

    def __init__(self, layout: Layout):
        self.layout = layout

    def count(self) -> int:
        """Largest number of rows that a method with a look may choose: `ratio` x the number of the chunks' rows."""
        ratio = self.layout.ask.ratio
        return int(len(self.layout.candidates) * (RATIO if ratio is None else ratio))

    @abstractmethod
    def choose(self, look: Look | None) -> np.ndarray:
        """The chosen rows, a subset of `layout.candidates`, int64 ascending."""


class Scored(Method):
    """Chooses the rows with the highest scores, or the pages whose rows have the highest sum of scores."""

    def choose(self, look: Look | None) -> np.ndarray:
        layout, count = self.layout, self.count()
        runs = np.arange(len(layout.candidates)) if layout.ask.granularity == "token" else layout.pages
        sizes = np.bincount(runs)
        taken = np.zeros(len(sizes), dtype=bool)
        for run in self.order(look, runs):
            if sizes[run] <= count:
                taken[run] = True
                count -= sizes[run]
        return layout.candidates[taken[runs]]

    def order(self, look: Look | None, runs: np.ndarray) -> np.ndarray:
        """The runs, int64, best first. `runs`: int64 [candidates], the run of each candidate."""
        return np.argsort(-_sums(runs, self.scores(look)), kind="stable")

    @abstractmethod
    def scores(self, look: Look | None) -> torch.Tensor:
        """A score for each candidate, float [candidates]; higher scores are chosen."""


class A3(Scored):
    """A3 (attention-aware fusion): chooses the rows that get the most attention of the question in layer 1.

    One softmax over concatenated heads for each question row, then a smoothed sum. The paper's ratio counts all rows.
    """

    name = "a3"
    look = DenseLook

    def scores(self, look: Look | None) -> torch.Tensor:
        assert isinstance(look, DenseLook)
        candidates, queries = self.layout.candidates, look.queries()
        question = np.arange(self.layout.question, len(self.layout.prompt))
        keys = look.true(look.executor.pool.k, np.concatenate((candidates, question)))
        grouped = queries.unflatten(1, (keys.shape[1], -1)).sum(2)  # equals repeating keys for their query heads
        logits = grouped.flatten(1) @ keys.flatten(1).T / math.sqrt(queries[0].numel())
        later = torch.ones(len(question), len(question), dtype=torch.bool, device=logits.device).triu(1)
        logits[:, len(candidates) :].masked_fill_(later, -torch.inf)
        summed = logits.softmax(dim=-1)[:, : len(candidates)].sum(0)
        return smooth(summed)


class CacheBlend(Scored):
    """CacheBlend (Yao et al. 2024): chooses rows by the squared difference of exact and stored values in layer 1."""

    name = "cacheblend"
    look = DenseLook

    def scores(self, look: Look | None) -> torch.Tensor:
        assert isinstance(look, DenseLook)
        candidates = self.layout.candidates
        true = look.true(look.executor.pool.v, candidates)
        return (true - look.stored_values(candidates)).square().sum((1, 2))


class ProphetKV(Scored):
    """After ProphetKV: chooses the rows that get the most attention of the question, averaged over some layers."""

    name = "prophetkv"
    look = QuestionLook

    def scores(self, look: Look | None) -> torch.Tensor:
        assert isinstance(look, QuestionLook)
        return look.scores()[0]


class Passages(ProphetKV):
    """Ramet's own: whole chunks, those first that a head attends to most sharply.

    An answer copies from one passage, and rows recomputed here and there no longer fit the stored ones around them.
    Of a chunk that does not fit as a whole, rows are chosen as by ProphetKV. The first rows of chunks that are encoded
    alone come before all others.
    """

    name = "passages"

    def order(self, look: Look | None, runs: np.ndarray) -> np.ndarray:
        assert isinstance(look, QuestionLook)
        scores, peaks = look.scores()
        places, sinks = self.layout.places, 0 if self.layout.ask.lead else _SINKS
        rank_of = np.empty(len(self.layout.prompt), dtype=np.int64)
        for rank, number in enumerate(np.argsort(-peaks.cpu().numpy(), kind="stable")):
            rank_of[places[number].rows] = rank
            if not places[number].begins:
                rank_of[places[number].rows[:sinks]] = -1
        sums = _sums(runs, scores)
        last = np.empty(len(sums), dtype=np.int64)
        last[runs] = rank_of[self.layout.candidates]  # of a run's rows, the last one's rank stays
        return np.lexsort((-sums, last))


class LegoLink(Method):
    """LegoLink-k (EPIC, Hu et al. 2024): chooses the first rows of each chunk, which act as attention sinks.

    It takes `ask.k` rows of each chunk, or the share `ratio` of them, but none of a chunk that begins the prompt.
    """

    name = "legolink"

    def choose(self, look: Look | None) -> np.ndarray:
        layout, ask = self.layout, self.layout.ask
        chosen = np.zeros(len(layout.prompt), dtype=bool)
        for place in layout.places:
            if not place.is_chunk or place.begins:
                continue
            k = ask.k if ask.ratio is None else math.ceil(ask.ratio * place.entry.length)
            if ask.granularity == "page":
                k = -(-k // layout.page_size) * layout.page_size
            chosen[place.rows[:k]] = True
        return layout.candidates[chosen[layout.candidates]]


class Pie(Method):
    """PIE (positional integrity encoding, He et al. 2024): document keys are only shifted; no row is chosen."""

    name = "pie"

    def choose(self, look: Look | None) -> np.ndarray:
        return self.layout.candidates[:0]


class Unrepaired(Pie):
    """Prompt Cache: no row is chosen, and arguments see the modules behind them."""

    name = "none"
    reads_all = True


class Full(Pie):
    """Full reuse, the baseline of the papers: the question is reused, too, and only its last row is computed."""

    name = "full"
    reuses_question = True


_ALL: tuple[type[Method], ...] = (A3, CacheBlend, ProphetKV, Passages, LegoLink, Pie, Full, Unrepaired)
METHODS = {method.name: method for method in _ALL}


def _sums(runs: np.ndarray, scores: torch.Tensor) -> np.ndarray:
    """The sum of scores, float32 [n], in each run, float64; `runs`: int64 [n]."""
    return np.bincount(runs, weights=scores.double().cpu().numpy())
