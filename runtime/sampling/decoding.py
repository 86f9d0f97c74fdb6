"""Next-token decoding of causal models."""

from collections.abc import Sequence

import numpy as np
import torch

from runtime.execution.transfers import upload
from runtime.protocol import Finish, TokenEvent, TokenLogprob
from runtime.request import Decoding, Request, Work
from runtime.sampler_state import StepResult
from runtime.sampling.sampler import Sampled, Sampler

_NO_ROWS, _ONE_ROW = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)


# Rows of the logits (None: all in order), the request of each row, and `expected` of `Sampler.sample`.
_Asking = tuple[list[int] | None, list[Request], list[int | None]]


class NextToken(Decoding):
    """Causal models: the last row of a sequence gives its next token."""

    def __init__(self, sampler: Sampler):
        super().__init__()
        self._sampler = sampler
        self._version = 0
        self._asking: _Asking = None, [], []

    def wanted(self, work: Work) -> np.ndarray:
        """The rows that need logits, int64: the last row if it gives a token, drafts, and scored prompt rows."""
        request = work.request
        if request.wants_prompt_logprobs:
            skipped = max((request.sampler.prompt_logprobs_from or 0) - 1 - work.start, 0)
            return np.arange(min(skipped, work.count), work.count)
        if not work.samples:
            return _NO_ROWS
        if work.draft:
            return np.arange(work.count)
        return _ONE_ROW if work.count == 1 else np.array((work.count - 1,))

    def choose(
        self, work: Sequence[Work], logit_rows: Sequence[Sequence[slice]], logits: torch.Tensor, version: int = 0
    ) -> Sampled | None:
        if version != self._version or not version:  # steps of the same plan have the same requests, one row each
            self._version, self._asking = version, _asking(work, logit_rows, len(logits))
        index, requests, expected = self._asking
        if not requests:
            return None
        if index is not None:
            logits = logits[upload(torch.tensor(index), logits.device)]
        return self._sampler.sample(logits, requests, work[0].ahead, expected)

    def cut(self, request: Request, tokens: list[int]) -> list[int]:
        for i, token in enumerate(tokens):
            if request.stops_at(token, request.num_output + i + 1):
                return tokens[: i + 1]
        return tokens

    def book(self, work: Work, result: StepResult) -> TokenEvent | None:
        request, tokens = work.request, result.tokens
        prompt_logprobs = None
        if request.sampler.prompt_logprobs_from is not None:
            prompt_logprobs = self._prompt_logprobs(work, result.logits, result.logit_rows[0])
        is_read = work.samples and not request.wants_tokens
        if is_read:
            tokens = []  # the request wants no token; one was chosen to check that the logits are finite
        if not (tokens or prompt_logprobs or is_read or request.note_progress()):
            return None
        if not tokens:
            event = request.take_event([], Finish("length") if is_read else None)
        else:
            request.tokens.extend(tokens)
            event = request.take_event(tokens, self._finish(request, tokens[-1]))
            event.logprobs = result.logprobs
        event.prompt_logprobs = prompt_logprobs
        return event

    def _prompt_logprobs(self, work: Work, logits: torch.Tensor, mine: slice) -> list[TokenLogprob] | None:
        """Log-probabilities of the prompt tokens that this work's rows predict."""
        request = work.request
        if not request.wants_prompt_logprobs:
            return None
        wanted = request.sampler.prompt_logprobs_from or 0
        end = min(work.start + work.count + 1, request.prompt_len)
        tokens = request.tokens[max(wanted, work.start + 1) : end].tolist()
        rows, top = logits[mine][: len(tokens)], request.message.logprobs or 0
        found = self._sampler.report_logprobs(rows, tokens, top) if tokens else []
        if wanted == 0:
            found.insert(0, TokenLogprob(request.tokens[0], None, []))
        request.sampler.prompt_logprobs_from = max(wanted, end)
        return found

    def _finish(self, request: Request, token: int) -> Finish | None:
        if request.stops_at(token, request.num_output):
            return Finish("stop", matched=token)
        if request.sampler.grammar is not None and request.sampler.grammar.complete:
            return Finish("stop")
        if len(request.tokens) >= request.max_length:
            return Finish("length")
        return None


def _asking(work: Sequence[Work], logit_rows: Sequence[Sequence[slice]], num_logits: int) -> _Asking:
    """The rows that give tokens, in the order of the logits."""
    firsts = sorted(
        (mine[0].stop - 1 - len(item.draft), at)
        for at, (item, mine) in enumerate(zip(work, logit_rows, strict=True))
        if mine[0].start < mine[0].stop and item.samples
    )
    index: list[int] = []
    requests: list[Request] = []
    expected: list[int | None] = []
    for first, at in firsts:
        item = work[at]
        index += range(first, first + 1 + len(item.draft))
        requests += [item.request] * (1 + len(item.draft))
        expected += [None, *item.draft]
    return None if index == list(range(num_logits)) else index, requests, expected
