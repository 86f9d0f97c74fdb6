"""Compares answers with reused KV and with full prefill, on the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from loadgen.experiments.accuracy.parts import Item
from loadgen.harness import Figure
from loadgen.offline.forced import Ask, Asker
from runtime.models.tokenizer import Tokenizer

FULL = "full prefill"
# Questions that run together, which are one repeat of a cell.
BATCH = 8
# Number of greedy tokens beyond the length of the right answer.
_MORE = 4

# KL and NLL are means over the right answer's tokens. KL is the distance to full prefill.
FIGURES = (
    Figure("kl", "KL, nats", ".4f", statistic="mean", plotted=True),
    Figure("nll", "NLL, nats", ".3f", statistic="mean", versus="difference"),
    Figure("right", "right, %", ".1f", 100, statistic="mean", versus="difference"),
)


class Judge:
    """Compares ways of reuse with full prefill, whose predictions for each task's latest questions are kept."""

    def __init__(self, asker: Asker, tokenizer: Tokenizer):
        self.asker, self.tokenizer = asker, tokenizer
        self._full: dict[str, tuple[list[Item], list[torch.Tensor]]] = {}

    @classmethod
    def open(cls, path: Path, **options: Any) -> Judge:
        """A judge with an engine of its own for the model directory `path`. The caller closes it."""
        return cls(Asker(path, **options), Tokenizer.load(path))

    def judge(
        self, task: str, items: list[Item], full: Sequence[Ask], mine: Sequence[Ask] | None
    ) -> dict[str, list[float]]:
        """Figures for one way of reuse, each with a value for each question; `mine` None: full prefill itself."""
        golds = [self.tokenizer.encode(item.answer, add_special_tokens=False) for item in items]
        if self._full.get(task, ([], []))[0] != items:
            self._full[task] = items, self._predict(full, golds)
        reference, asks = self._full[task][1], full if mine is None else mine
        found = reference if mine is None else self._predict(asks, golds)
        said = self._greedy(asks, golds, found)
        self.asker.end()
        figures: dict[str, list[Any]] = {"nll": [], "right": []} | ({} if mine is None else {"kl": []})
        for item, gold, exact, logprobs, tokens in zip(items, golds, reference, found, said, strict=True):
            figures["nll"].append(-float(logprobs[range(len(gold)), gold].mean()))
            figures["right"].append(float(item.is_right(self.tokenizer.decode(tokens))))
            if mine is not None:
                exact, logprobs = exact[: len(gold)], logprobs[: len(gold)]
                figures["kl"].append(float((exact.exp() * (exact - logprobs)).sum(-1).mean()))
        return figures

    def _predict(self, asks: Sequence[Ask], golds: Sequence[list[int]]) -> list[torch.Tensor]:
        """The log-probabilities at each answer's tokens and at the token behind them."""
        return self.asker.forced(asks, [[*gold, gold[-1]] for gold in golds])

    def _greedy(
        self, asks: Sequence[Ask], golds: Sequence[list[int]], found: Sequence[torch.Tensor]
    ) -> list[list[int]]:
        """Greedy answers. If the right answer's tokens are all the most likely ones, it is not computed again."""
        best = [logprobs.argmax(-1).tolist() for logprobs in found]
        known = [tokens[:-1] == gold for tokens, gold in zip(best, golds, strict=True)]
        open_asks = [ask for ask, is_known in zip(asks, known, strict=True) if not is_known]
        fresh = iter(self.asker.greedy(open_asks, max(map(len, golds)) + _MORE))
        return [tokens if is_known else next(fresh) for tokens, is_known in zip(best, known, strict=True)]
