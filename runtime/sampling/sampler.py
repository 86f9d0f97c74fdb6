"""The sampler: penalties, filters, and a random stream for each request."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import torch

from runtime.errors import InvalidRequest, RametError
from runtime.execution.transfers import Download, upload
from runtime.params import SamplingParams
from runtime.protocol import TokenLogprob
from runtime.request import Request
from runtime.sampling.filters import filter_probs, has_filters
from runtime.sampling.logprobs import Measured, list_logprobs, measure_logprobs

log = logging.getLogger("ramet.engine")

# Placeholder for a token that could not be chosen.
NO_TOKEN = -1

_WORD = (1 << 64) - 1

# A token that is drawn again gets another random stream: the number of the try, shifted by this many bits, is added.
_TRIES = 40

# Tokens in a block: `draw` first draws a block, then a token in it.
_BLOCK = 64
_LEAST_NOISE = 1e-30

# Most rows that a CPU samples at once. Larger buffers would be allocated each time, which costs more than sampling.
_TOGETHER = 64


# `Executor.draw`.
Draw = Callable[[torch.Tensor, Sequence[float], torch.Tensor], torch.Tensor]


class BadLogits(RametError):
    """The logits of a row are not finite."""

    def __init__(self) -> None:
        super().__init__("the model's logits for this request are not finite numbers")


class Sampled:
    """One token for each row of logits, with its transfer to the host."""

    def __init__(
        self,
        tokens: torch.Tensor,
        failures: Mapping[int, RametError],
        tops: Mapping[int, int],
        measured: Measured,
        requests: Sequence[Request],
        expected: Sequence[int | None] | None,
    ):
        """Start the transfer.

        Args:
            tokens: int64 [n]; `NO_TOKEN` for a row that failed.
            failures: errors of rows without a token, except for bad logits.
            tops: number of alternatives, for rows whose requests want log-probabilities.
            measured: log-probabilities of the rows in `tops`.
            requests, expected: see `Sampler.sample`.
        """
        self._tokens, self._failures, self._tops = tokens, failures, tops
        self._requests, self._expected = requests, expected
        self._download = Download([tokens, *measured], tokens.device)

    def on_device(self, requests: Sequence[Request]) -> torch.Tensor:
        """Tokens of some of the requests, int64 [n], without waiting for the device; 0 for a failed row."""
        tokens = self._tokens.clamp_min(0)
        if requests == self._requests:
            return tokens
        rows = {request: row for row, request in enumerate(self._requests)}
        index = torch.tensor([rows[request] for request in requests], dtype=torch.int64)
        return tokens[upload(index, tokens.device)]

    def read(self) -> list[int | RametError]:
        """Wait for the transfer; returns the token of each row, or the error of a failed row."""
        tokens = self._download.wait()[0].tolist()
        return [self._failures.get(i) or BadLogits() if t == NO_TOKEN else t for i, t in enumerate(tokens)]

    def chosen(self) -> dict[Request, list[int] | RametError]:
        """Wait for the transfer; returns the next tokens of each request, or its error.

        A request has several tokens if its draft was right. An error after a right token is left to the next step.
        """
        found: dict[Request, list[int] | RametError] = {}
        following: list[int] = []  # accepted tokens of the current request; empty after a wrong draft token
        expected = self._expected or [None] * len(self._requests)
        for request, before, token in zip(self._requests, expected, self.read(), strict=True):
            if before is None:
                following = [] if isinstance(token, RametError) else [token]
                found[request] = token if isinstance(token, RametError) else following
            elif not following or following[-1] != before or isinstance(token, RametError):
                following = []
            else:
                following.append(token)
        return found

    def logprobs(self) -> dict[Request, list[TokenLogprob]]:
        """Log-probabilities for requests that want them, one for each row: rejected draft rows are included."""
        found: dict[Request, list[TokenLogprob]] = {}
        if not self._tops:
            return found
        tokens, *measured = self._download.wait()
        listed = list_logprobs(tokens[list(self._tops)].tolist(), measured)
        for logprob, (row, top) in zip(listed, self._tops.items(), strict=True):
            del logprob.top[top:]
            found.setdefault(self._requests[row], []).append(logprob)
        return found


def highest(logits: torch.Tensor) -> torch.Tensor:
    """The tokens with the highest logits [n, vocab], int64 [n]; `NO_TOKEN` if this logit is not finite."""
    best = logits.argmax(-1)
    # argmax treats NaN as the maximum, so the chosen logit shows whether the row has a NaN.
    return best.where(logits.gather(-1, best[:, None])[:, 0].isfinite(), NO_TOKEN)


class Sampler:
    """Samples one token for each row of logits.

    Args:
        vocab_size: columns of the logits.
        device: device of the logits.
        argmax: `highest`, or `Executor.argmax`.
        draw: `Executor.draw`, which draws for requests without filters.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        argmax: Callable[[torch.Tensor], torch.Tensor] = highest,
        draw: Draw | None = None,
    ):
        self.vocab_size = vocab_size
        self.device = device
        self._argmax, self._draw = argmax, draw
        # The second generator is seeded again for every token of a request with a seed.
        self._unseeded, self._seeded = torch.Generator(device), torch.Generator(device)
        self._unseeded.seed()
        self._may_wait = device.type == "cpu"

    def sample(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        ahead: int = 0,
        expected: Sequence[int | None] | None = None,
    ) -> Sampled:
        """Choose the next tokens. This waits for the device only for a grammar, or for a draft with penalties.

        Rows after a rejected draft token get an arbitrary token or none, which is never used.

        Args:
            logits: float32 [n, vocab]; neither changed nor read after the return.
            requests: n requests; one with a draft appears once per row.
            ahead: number of tokens of each request that the host has not read yet.
            expected: by row, the draft's token that the row before it has to choose; None: the row follows no draft.
        """
        tokens = best = self._argmax(logits)
        if all([request.sampler.params.takes_best for request in requests]):
            return Sampled(best, {}, *self._measure(logits, best, requests), requests, expected)
        aheads = _aheads(len(requests), ahead, expected)
        adjusts = [_adjusts(request, at) for request, at in zip(requests, aheads, strict=True)]
        alone = [i for i, adjusted in enumerate(adjusts) if adjusted]
        drawing = [i for i, r in enumerate(requests) if not r.sampler.params.greedy and not adjusts[i]]
        failures: dict[int, RametError] = {}
        if drawing:
            asking = [requests[i] for i in drawing]
            drawn = self._draw_all(self._rows(logits, drawing), asking, [aheads[i] for i in drawing])
            tokens = drawn if len(drawing) == len(best) else best.index_copy(0, self._index(drawing), drawn)
        if alone:
            tokens = tokens.clone()
        for i in alone:
            if expected is not None and (wanted := expected[i]) is not None:
                before = int(tokens[i - 1])
                if before != wanted or _ended(requests[i], before, aheads[i]):
                    tokens[i] = NO_TOKEN
                    continue
            try:
                drafted = [token for token in (expected or ())[i + 1 - aheads[i] : i + 1] if token is not None]
                tokens[i] = self._one(logits[i], best[i], requests[i], aheads[i], drafted)
            except RametError as error:
                failures[i] = error
            except Exception as error:
                log.exception("no token could be chosen for request %s", requests[i].rid)
                failures[i] = RametError(f"no token could be chosen: {type(error).__name__}")
        if failures:
            tokens.index_fill_(0, self._index(list(failures)), NO_TOKEN)
        if tokens is not best:
            tokens = tokens.where(best != NO_TOKEN, NO_TOKEN)
        return Sampled(tokens, failures, *self._measure(logits, tokens, requests), requests, expected)

    def _measure(
        self, logits: torch.Tensor, tokens: torch.Tensor, requests: Sequence[Request]
    ) -> tuple[dict[int, int], Measured]:
        """`Sampled`'s `tops` and `measured` of the chosen tokens."""
        tops = {
            i: request.message.logprobs for i, request in enumerate(requests) if request.message.logprobs is not None
        }
        if not tops:
            return {}, []
        chosen = self._rows(tokens, list(tops)).clamp_min(0)
        return tops, measure_logprobs(self._rows(logits, list(tops)), chosen, max(tops.values()))

    def _rows(self, tensor: torch.Tensor, index: Sequence[int]) -> torch.Tensor:
        return tensor if len(index) == len(tensor) else tensor[self._index(index)]

    def _index(self, index: Sequence[int]) -> torch.Tensor:
        return upload(torch.tensor(index, dtype=torch.int64), self.device)

    def _draw_all(self, logits: torch.Tensor, requests: Sequence[Request], aheads: Sequence[int]) -> torch.Tensor:
        """Draw tokens, int64 [n], from logits [n, vocab], without bias, penalties and grammar."""
        if self._may_wait and len(logits) > _TOGETHER:
            pieces = [slice(at, at + _TOGETHER) for at in range(0, len(logits), _TOGETHER)]
            return torch.cat([self._draw_all(logits[one], requests[one], aheads[one]) for one in pieces])
        params = [request.sampler.params for request in requests]
        plain = [self._draw is not None and not has_filters(p) for p in params]
        if len(set(plain)) > 1:  # a request gets the same token, whatever the others want
            drawn = torch.empty(len(requests), dtype=torch.int64)
            for kind in (True, False):
                rows = [i for i, is_plain in enumerate(plain) if is_plain == kind]
                drawn[rows] = self._draw_all(logits[rows], [requests[i] for i in rows], [aheads[i] for i in rows])
            return drawn
        noise = logits.new_empty(len(logits), -(-logits.shape[-1] // _BLOCK) + _BLOCK)
        if any(p.seed is None for p in params):
            noise.exponential_(generator=self._unseeded)
        for row, request, ahead in zip(noise, requests, aheads, strict=True):
            if request.sampler.params.seed is not None:
                row.exponential_(generator=self.generator(request, ahead))
        if self._draw is not None and all(plain):
            return self._draw(logits, [p.divisor for p in params], noise)
        return draw(self.filter(logits, params), noise)

    def filter(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        """The distributions [n, vocab] of n requests after temperature and filters; dropped tokens have 0."""
        probs = (logits / self._column([p.divisor for p in params])).softmax(-1)
        for row, p in zip(probs, params, strict=True):
            if has_filters(p):
                row.copy_(filter_probs(row, p, self._may_wait))
        return probs

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        """Float32 [n, 1] on the device."""
        return upload(torch.tensor(values, dtype=torch.float32), self.device)[:, None]

    def _one(
        self, logits: torch.Tensor, best: torch.Tensor, request: Request, ahead: int, drafted: Sequence[int]
    ) -> torch.Tensor:
        """The token of a request whose logits are adjusted.

        Args:
            logits, best: float32 [vocab], and their argmax.
            drafted: the draft's tokens before this one.
        """
        logits = self._adjust(logits.clone(), request, ahead, drafted)
        for tries in count():
            # New noise for each try: the grammar refused the last token.
            at = [ahead + (tries << _TRIES)]
            token = logits.argmax() if request.sampler.params.greedy else self._draw_all(logits[None], [request], at)[0]
            if request.sampler.grammar is None:
                break
            value = int(token.where(best != NO_TOKEN, NO_TOKEN))
            if value == NO_TOKEN:
                raise BadLogits
            if request.sampler.grammar.accept(value):
                break
            logits[value] = -math.inf
        if request.sampler.counts is not None:
            request.sampler.counts.index_add_(0, token.clamp_min(0)[None], request.sampler.counts.new_ones(1))
        return token

    def _adjust(
        self, logits: torch.Tensor, request: Request, ahead: int = 0, drafted: Sequence[int] = ()
    ) -> torch.Tensor:
        """Apply bias, penalties, limits, the minimum length and the grammar, in place. Raises InvalidRequest."""
        params = request.sampler.params
        if params.logit_bias:
            biases = upload(torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype), self.device)
            logits.index_add_(0, self._index(list(params.logit_bias)), biases)
        if params.penalised:
            self._penalise(logits, request)
        forbidden = None if request.sampler.grammar is None else request.sampler.grammar.forbidden(len(logits))
        if forbidden is not None:
            logits.masked_fill_(upload(torch.from_numpy(forbidden), self.device), -math.inf)
        elif request.num_output + ahead < params.min_new_tokens and request.sampler.stop_ids:
            logits.index_fill_(0, self._index(sorted(request.sampler.stop_ids)), -math.inf)
        if params.limited:
            self._limit(logits, request, drafted)
        return logits

    def _limit(self, logits: torch.Tensor, request: Request, drafted: Sequence[int]) -> None:
        """Forbid tokens that are not allowed or would complete a bad word. Raises InvalidRequest if none is left."""
        allowed, words = request.sampler.params.allowed_token_ids, request.message.bad_words
        if allowed:
            index = self._index(allowed)
            kept = logits[index]
            logits.fill_(-math.inf)[index] = kept
        longest = max(map(len, words), default=0)
        output = [*request.tokens[max(request.prompt_len, len(request.tokens) - longest) :], *drafted]
        ends = [last for *before, last in words if output[max(len(output) - len(before), 0) :] == before]
        logits.index_fill_(0, self._index(ends), -math.inf)
        if logits.max() == -math.inf:
            raise InvalidRequest("no token may follow: allowed_token_ids and bad_words leave none", param="bad_words")

    def _penalise(self, logits: torch.Tensor, request: Request) -> None:
        params = request.sampler.params
        if request.sampler.counts is None:
            # The counts stay on the device from now on, because the host may not have read the last token yet.
            ids = torch.tensor(request.entry_tokens + request.tokens, dtype=torch.int64)
            request.sampler.prompt_ids = upload(ids[: request.num_prompt].unique(), self.device)
            counts = torch.bincount(ids[request.num_prompt :], minlength=self.vocab_size)
            request.sampler.counts = upload(counts, self.device)
        counts = request.sampler.counts
        if params.repetition_penalty != 1:
            seen = counts > 0
            seen[request.sampler.prompt_ids] = True
            scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits.copy_(torch.where(seen, scaled, logits))
        logits -= params.frequency_penalty * counts
        logits -= params.presence_penalty * (counts > 0)

    def generator(self, request: Request, ahead: int = 0) -> torch.Generator:
        """The random stream of the next token of a request with a seed.

        It depends only on the seed and the token's index, so a repeated step draws the same token.
        """
        assert request.sampler.params.seed is not None
        return self._seeded.manual_seed(_mix(request.sampler.params.seed, request.num_output + ahead))


def draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Draw tokens, int64 [n], with probabilities proportional to weights [n, vocab]; `NO_TOKEN` for NaN weights.

    The largest weight / noise wins (exponential races): first among the sums of blocks, then within the block. Unlike
    a search in cumulative sums, the result hardly depends on the rounding of other weights.

    Args:
        weights: not negative.
        noise: exponential noise [n, number of blocks + size of a block].
    """
    if more := -weights.shape[-1] % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, more))
    blocks = weights.unflatten(-1, (-1, _BLOCK))
    noise = noise.clamp_min(_LEAST_NOISE)  # 0 / 0 would win
    block = (blocks.sum(-1) / noise[:, :-_BLOCK]).argmax(-1)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block]
    token = (inside / noise[:, -_BLOCK:]).argmax(-1)
    return (block * _BLOCK + token).where(inside.sum(-1).isfinite(), NO_TOKEN)


def _mix(seed: int, place: int) -> int:
    """A 63-bit hash of the seed and a token's index (SplitMix64's finalizer)."""
    z = (seed + (place + 1) * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return (z ^ (z >> 31)) >> 1


def _aheads(rows: int, ahead: int, expected: Sequence[int | None] | None) -> list[int]:
    """For each row, the number of its request's tokens between the last known token and its own."""
    aheads = [ahead] * rows
    for i, token in enumerate(expected or ()):
        if token is not None:
            aheads[i] = aheads[i - 1] + 1
    return aheads


def _ended(request: Request, token: int, num_drafted: int) -> bool:
    """Whether a token ends a request whose output has grown by `num_drafted` drafted tokens."""
    done = request.sampler.grammar is not None and request.sampler.grammar.complete
    return done or request.stops_at(token, request.num_output + num_drafted)


def _adjusts(request: Request, ahead: int) -> bool:
    params = request.sampler.params
    return (
        bool(params.logit_bias)
        or request.sampler.grammar is not None
        or params.penalised
        or params.limited
        or request.num_output + ahead < params.min_new_tokens
    )
