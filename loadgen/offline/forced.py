"""Teacher forcing: logits of given answers behind prompts with any reuse method, and greedy answers."""

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from loadgen.offline.drive import Drive
from runtime.asks import ReuseAsk
from runtime.features.diffusion.ask import DenoisingParams
from runtime.protocol import TokenEvent
from runtime.request import Decoding, Request, Work
from runtime.sampler_state import SampledTokens, StepResult


class Ask(NamedTuple):
    """The tokens of a prompt, and what it asks of a strategy; None: full prefill."""

    tokens: list[int]
    asked: ReuseAsk | None = None


_UNLIKELY = -1e4


class Forcing(Decoding):
    """Wraps another decoding. Requests in `answers` get these tokens first, whatever their logits.

    Because the tokens come one by one, a reuse method chooses its rows without seeing the answer.

    Attributes:
        answers: tokens by request id.
        watch: called with the request's id, the token's index, and the logits [vocab] at its position.
    """

    def __init__(self, inner: Decoding, watch: Callable[[str, int, torch.Tensor], None]):
        super().__init__()
        self._inner = inner
        self.answers: dict[str, list[int]] = {}
        self.watch = watch

    def open(self, request: Request, params: DenoisingParams | None) -> None:
        self._inner.open(request, params)

    def wanted(self, work: Work) -> np.ndarray:
        return self._inner.wanted(work)

    def choose(
        self, work: Sequence[Work], logit_rows: Sequence[Sequence[slice]], logits: torch.Tensor, version: int = 0
    ) -> SampledTokens | None:
        forced = logits.clone()
        for item, mine in zip(work, logit_rows, strict=True):
            if item.samples and mine[0].start < mine[0].stop:
                self._force(item, mine[0].stop - 1 - len(item.draft), logits, forced)
        return self._inner.choose(work, logit_rows, forced, version)

    def _force(self, item: Work, row: int, logits: torch.Tensor, forced: torch.Tensor) -> None:
        """Force the tokens from logits row `row` on. Rows behind a rejected draft token are not used."""
        first = item.request.num_output + item.ahead
        answer = self.answers.get(item.request.rid, [])[first : first + 1 + len(item.draft)]
        for number, token in enumerate(answer):
            self.watch(item.request.rid, first + number, logits[row + number])
            forced[row + number] = _UNLIKELY
            forced[row + number, token] = 0
            if number < len(item.draft) and item.draft[number] != token:
                return

    def book(self, work: Work, result: StepResult) -> TokenEvent | None:
        return self._inner.book(work, result)


class Asker(Drive):
    """An engine core that answers several prompts at once."""

    def __init__(self, path: Path, **options: Any):
        super().__init__(path, overlap="off", **options)
        self._kept: dict[str, list[torch.Tensor]] = {}
        self._forcing = self.core.decoding = Forcing(self.core.decoding, self._keep)

    def forced(self, asks: Sequence[Ask], answers: Sequence[list[int]]) -> list[torch.Tensor]:
        """For each answer of n tokens, the log-probabilities of all tokens at its positions, float32 [n, vocab]."""
        rids = []
        for ask, answer in zip(asks, answers, strict=True):
            self._forcing.answers[f"{self._count + 1}"] = answer
            self.add(array("i", ask.tokens), len(answer), ask.asked)
            rids.append(f"{self._count}")
        said = self._run()
        assert [said[rid] for rid in rids] == list(answers)
        self._forcing.answers.clear()
        return [torch.stack(self._kept.pop(rid)).log_softmax(-1) for rid in rids]

    def _keep(self, rid: str, number: int, logits: torch.Tensor) -> None:
        self._kept.setdefault(rid, []).append(logits.clone())

    def greedy(self, asks: Sequence[Ask], output: int) -> list[list[int]]:
        """The greedy tokens behind each prompt, up to an end-of-text token."""
        rids = []
        for ask in asks:
            self.add(array("i", ask.tokens), output, ask.asked, {"ignore_eos": False})
            rids.append(f"{self._count}")
        found = self._run()
        ends = set(self.core.info.eos_token_ids)
        return [_before(found[rid], ends) for rid in rids]

    def _run(self) -> dict[str, list[int]]:
        """Run all requests to their end; returns tokens by request id. Raises BenchError if one fails."""
        tokens: dict[str, list[int]] = {}
        while self.core.busy:
            for event in self.events():
                tokens.setdefault(event.rid, []).extend(event.tokens)
        return tokens


def _before(tokens: list[int], ends: set[int]) -> list[int]:
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]
