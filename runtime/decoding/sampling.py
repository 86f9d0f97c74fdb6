"""From logits to tokens: penalties, filters, and a random stream of its own for every request."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch

from runtime.errors import RametError
from runtime.protocol import TokenLogprob
from runtime.request import Request
from runtime.sampling_params import SamplingParams

log = logging.getLogger("ramet.engine")

# Below it the quotient leaves float32; the most likely token is certain long before.
_LEAST_TEMPERATURE = 1e-4


class BadLogits(RametError):
    """The model computed something that is no number."""

    def __init__(self) -> None:
        super().__init__("the model's logits for this request are not finite numbers")


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The highest tokens [n] of logits [n, vocab]."""
    return logits.argmax(-1)


class Sampler:
    """Chooses one token for each of some requests.

    Args:
        vocab_size: columns of the logits.
        device: where the logits are.
        argmax: the highest tokens [n] of logits [n, vocab].
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        argmax: Callable[[torch.Tensor], torch.Tensor] = argmax,
    ):
        self.vocab_size = vocab_size
        self.device = device
        self._argmax = argmax

    def sample(self, logits: torch.Tensor, requests: list[Request]) -> list[int | RametError]:
        """The next tokens; for a request that cannot have one, why: it fails alone.

        Args:
            logits: float32 [n, vocab]; not changed.
            requests: whose logits these are.
        """
        best = self._argmax(logits)
        # argmax takes a NaN for the greatest, so a look at what it chose tells whether there is one in the row.
        sound = logits.gather(-1, best[:, None])[:, 0].isfinite()
        found: list[int | RametError | None] = []
        drawing: list[int] = []
        for i, (token, good) in enumerate(zip(*torch.stack((best, sound.long())).tolist(), strict=True)):
            request = requests[i]
            found.append(None)
            if not good:
                found[i] = BadLogits()
            elif _adjusts(request):
                found[i] = self._try_one(logits[i], request)
            elif request.sampling.greedy:
                found[i] = token
            else:
                drawing.append(i)
        if drawing:
            rows = logits if len(drawing) == len(logits) else logits[drawing]
            for i, drawn in zip(drawing, self._draw_all(rows, [requests[i] for i in drawing]), strict=True):
                found[i] = drawn
        return found  # type: ignore[return-value]

    def _draw_all(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int | RametError]:
        """Draw for requests that change nothing of their logits [n, vocab]."""
        return [self._try_one(row, request) for row, request in zip(logits, requests, strict=True)]

    def _try_one(self, logits: torch.Tensor, request: Request) -> int | RametError:
        try:
            return self._one(logits, request)
        except RametError as error:
            return error
        except Exception as error:
            log.exception("no token could be chosen for request %s", request.rid)
            return RametError(f"no token could be chosen: {type(error).__name__}")

    def _one(self, logits: torch.Tensor, request: Request) -> int:
        params = request.sampling
        if _adjusts(request):
            logits = self._adjust(logits.clone(), request)
        token = int(logits.argmax()) if params.greedy else self._draw(logits, request)
        if request.counts is not None:
            request.counts[token] += 1
        if request.grammar is not None:
            request.grammar.accept(token)
        return token

    def _adjust(self, logits: torch.Tensor, request: Request) -> torch.Tensor:
        """Apply bias, penalties, the minimum length and the grammar, in place."""
        params = request.sampling
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if _penalised(params):
            self._penalise(logits, request)
        if request.grammar is not None:
            forbidden = torch.from_numpy(request.grammar.forbidden(len(logits)))
            logits[forbidden.to(logits.device)] = -math.inf
        elif request.num_output < params.min_new_tokens and request.stop_ids:
            logits[list(request.stop_ids)] = -math.inf
        return logits

    def _penalise(self, logits: torch.Tensor, request: Request) -> None:
        params = request.sampling
        if request.counts is None:
            ids = torch.tensor(request.tokens, dtype=torch.int64, device=self.device)
            request.prompt_ids = ids[: request.prompt_len].unique()
            request.counts = torch.bincount(ids[request.prompt_len :], minlength=self.vocab_size)
        counts = request.counts
        if params.repetition_penalty != 1:
            seen = counts > 0
            seen[request.prompt_ids] = True
            scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits.copy_(torch.where(seen, scaled, logits))
        logits -= params.frequency_penalty * counts
        logits -= params.presence_penalty * (counts > 0)

    def generator(self, request: Request) -> torch.Generator:
        """The random stream of a request."""
        if request.generator is None:
            request.generator = torch.Generator(self.device)
            if request.sampling.seed is None:
                request.generator.seed()
            else:
                request.generator.manual_seed(request.sampling.seed)
        return request.generator

    def _draw(self, logits: torch.Tensor, request: Request) -> int:
        """Draw from the filtered distribution by racing exponentials, which needs no cumulative sum."""
        probs = filter_probs(logits, request.sampling)
        noise = torch.empty_like(probs).exponential_(generator=self.generator(request))
        token = int((probs / noise).argmax())
        if not probs[token].isfinite():
            raise BadLogits
        return token


def filter_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution [vocab] after temperature, then top-k, top-p and min-p; dropped tokens have probability 0."""
    probs = (logits / max(params.temperature, _LEAST_TEMPERATURE)).softmax(-1)
    if 0 < params.top_k < len(probs):
        values, tokens = probs.topk(params.top_k)
        probs = torch.zeros_like(probs).scatter_(0, tokens, values)
        probs /= probs.sum()
    if params.top_p < 1:
        values, tokens = probs.sort(descending=True)
        dropped = tokens[values.cumsum(0) - values >= params.top_p]
        probs[dropped] = 0
    if params.min_p > 0:
        probs[probs < params.min_p * probs.max()] = 0
    return probs


def report_logprobs(logits: torch.Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of given tokens under the model's own distribution (before any filter).

    Args:
        logits: float32 [n, vocab].
        tokens: n token ids.
        top: how many of the most likely tokens to name as well.
    """
    logprobs = logits.log_softmax(-1).clamp_min(-9999.0)  # JSON has no infinity
    chosen = logprobs[torch.arange(len(tokens)), torch.tensor(tokens, device=logits.device)].tolist()
    values, ids = logprobs.topk(min(top, logprobs.shape[-1])) if top else (None, None)
    return [
        TokenLogprob(
            token,
            chosen[i],
            list(zip(ids[i].tolist(), values[i].tolist(), strict=True))
            if ids is not None and values is not None
            else [],
        )
        for i, token in enumerate(tokens)
    ]


def _penalised(params: SamplingParams) -> bool:
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1)


def _adjusts(request: Request) -> bool:
    params = request.sampling
    return (
        bool(params.logit_bias)
        or request.grammar is not None
        or _penalised(params)
        or request.num_output < params.min_new_tokens
    )
