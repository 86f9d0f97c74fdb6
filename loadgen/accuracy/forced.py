"""Teacher forcing: the logits of given answers behind prompts of any reuse method, and greedy answers beside them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from loadgen.micro.drive import Drive
from runtime.protocol import TokenEvent, TokenLogprob
from runtime.request import Request, Work
from runtime.sampling.decoding import Decoding
from runtime.sampling.sampler import Sampled


class Ask(NamedTuple):
    """A prompt's own tokens, and the `reuse` fields of its message; None: all of it is computed in order."""

    tokens: list[int]
    reuse: dict[str, Any] | None = None


class _Keeping(Decoding):
    """Another decoding; of the requests in `answers`, the logits that predict their last tokens are kept.

    Attributes:
        answers: how many tokens, by request id.
        kept: float32 [n, vocab] of each step that had such rows.
    """

    def __init__(self, inner: Decoding):
        super().__init__()
        self._inner = inner
        self.answers: dict[str, int] = {}
        self.kept: dict[str, list[torch.Tensor]] = {}

    def open(self, request: Request, asked: dict[str, Any]) -> None:
        self._inner.open(request, asked)

    def wanted(self, work: Work) -> np.ndarray:
        """Also the rows before the answer's tokens, and the last row, which every prompt needs."""
        length = self.answers.get(work.request.rid)
        if length is None:
            return self._inner.wanted(work)
        first = work.request.prompt_len - 1 - length - work.start
        return np.arange(min(max(first, 0), work.count), work.count)

    def choose(
        self, work: Sequence[Work], places: Sequence[Sequence[slice]], logits: torch.Tensor
    ) -> tuple[list[Request], Sampled | None]:
        return self._inner.choose(work, places, logits)

    def book(
        self,
        work: Work,
        logits: torch.Tensor,
        places: Sequence[slice],
        token: int | None,
        logprob: TokenLogprob | None,
    ) -> TokenEvent | None:
        if work.request.rid in self.answers:
            self.kept.setdefault(work.request.rid, []).append(logits[places[0]].clone())
        return self._inner.book(work, logits, places, token, logprob)


class Asker(Drive):
    """An engine core that is asked several prompts at once."""

    def __init__(self, path: Path, **options: Any):
        super().__init__(path, **options)
        self._keeping = self.core.decoding = _Keeping(self.core.decoding)

    def forced(self, asks: Sequence[Ask], answers: Sequence[list[int]]) -> list[torch.Tensor]:
        """Log-probabilities, float32 [n, vocab], of all tokens in the place of each of an answer's n tokens."""
        rids = []
        for ask, answer in zip(asks, answers, strict=True):
            self._keeping.answers[f"{self._count + 1}"] = len(answer)
            self.add(array("i", ask.tokens + answer), 0, ask.reuse)
            rids.append(f"{self._count}")
        self._run()
        found = [torch.cat(self._keeping.kept.pop(rid))[:-1] for rid in rids]
        self._keeping.answers.clear()
        for logits, answer in zip(found, answers, strict=True):
            assert len(logits) == len(answer), "the cache held rows whose logits were wanted"
        return [logits.log_softmax(-1) for logits in found]

    def greedy(self, asks: Sequence[Ask], output: int) -> list[list[int]]:
        """The most likely tokens behind each prompt, up to an end of text."""
        rids = []
        for ask in asks:
            self.add(array("i", ask.tokens), output, ask.reuse)
            rids.append(f"{self._count}")
        found = self._run()
        ends = set(self.core.info.eos_token_ids)
        return [_before(found[rid], ends) for rid in rids]

    def _run(self) -> dict[str, list[int]]:
        """Run all requests to their ends; tokens by request id. Raises AssertionError for one that is refused."""
        tokens: dict[str, list[int]] = {}
        while self.core.busy:
            for event in self.core.step():
                assert event.finish is None or event.finish.type != "error", event.finish
                tokens.setdefault(event.rid, []).extend(event.tokens)
        return tokens


def _before(tokens: list[int], ends: set[int]) -> list[int]:
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]
