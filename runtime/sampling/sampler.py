"""The sampler: what restricts each request's tokens, and a random stream for each."""

from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
import torch
from cachetools import LRUCache

from runtime.errors import InvalidRequest, RametError
from runtime.execution.transfers import Download, index_on, upload
from runtime.protocol import TokenLogprob
from runtime.request import Request
from runtime.sampler_state import NO_TOKEN, Choosing, Measured, Seen, TokenChoice
from runtime.sampling.followers import Follower, Followers, noting
from runtime.sampling.logprobs import list_logprobs

_WORD = (1 << 64) - 1

# Lists of allowed tokens to remember as masks.
_LISTS = 64


class BadLogits(RametError):
    """The logits of a row are not finite."""

    def __init__(self) -> None:
        super().__init__("the model's logits for this request are not finite numbers")


class Sampled:
    """One token for each row of logits, with its transfer to the host.

    Attributes:
        changed: after `chosen`: whether a grammar has refused a token that `on_device` gave.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        failures: Mapping[int, RametError],
        tops: Mapping[int, int],
        measured: Measured,
        requests: Sequence[Request],
        expected: Sequence[int | None] | None,
        followers: Followers | None = None,
    ):
        """Start the transfer.

        Args:
            tokens: int64 [n]; `NO_TOKEN` for a row that failed.
            failures: errors of rows without a token, except for bad logits.
            tops: number of alternatives, for rows whose requests want log-probabilities.
            measured: log-probabilities of the rows in `tops`.
            requests, expected: see `Sampler.sample`.
            followers: those whose grammars advance when the host has read the tokens.
        """
        self._tokens, self._failures, self._tops = tokens, failures, tops
        self._requests, self._expected, self._followers = requests, expected, followers
        self._read: list[int] = []
        self._download = Download([tokens, *measured], tokens.device)

    @property
    def changed(self) -> bool:
        return self._followers is not None and bool(self._followers.redrawn)

    def on_device(self, requests: Sequence[Request]) -> torch.Tensor:
        """Tokens of some of the requests, int64 [n], without waiting for the device; 0 for a failed row."""
        tokens = self._tokens.clamp_min(0)
        if requests == self._requests:
            return tokens
        rows = {request: row for row, request in enumerate(self._requests)}
        return tokens[index_on([rows[request] for request in requests], tokens.device)]

    def read(self) -> list[int | RametError]:
        """Wait for the transfer and let grammars advance; returns the token of each row, or its error. Call it once."""
        self._read = tokens = self._download.wait()[0].tolist()
        if self._followers is not None:
            self._followers.advance(tokens)
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
            if self._followers is not None and row in self._followers.redrawn:
                logprob = self._followers.measured(row, max(self._read[row], 0), top)
            del logprob.top[top:]
            found.setdefault(self._requests[row], []).append(logprob)
        return found


class Sampler:
    """Samples one token for each row of logits.

    Args:
        vocab_size: columns of the logits.
        device: device of the logits.
        choosing: computes with the logits; None: torch.
    """

    def __init__(self, vocab_size: int, device: torch.device, choosing: Choosing | None = None):
        self.vocab_size = vocab_size
        self.device = device
        if choosing is None:
            from runtime.sampling.choosing import TorchChoosing

            choosing = TorchChoosing()
        self._choosing = choosing
        self._random = Random()
        self._allowed_by_list: LRUCache[int, tuple[list[int], np.ndarray]] = LRUCache(_LISTS)

    def sample(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        ahead: int = 0,
        expected: Sequence[int | None] | None = None,
    ) -> Sampled:
        """Choose the next tokens. This waits for the device only for a draft behind which a choice depends on tokens.

        Rows after a rejected draft token get an arbitrary token or none, which is never used.

        Args:
            logits: float32 [n, vocab]; neither changed nor read after the return.
            requests: n requests; one with a draft appears once per row.
            ahead: number of tokens of each request that the host has not read yet.
            expected: by row, the draft's token that the row before it has to choose; None: the row follows no draft.
        """
        failures: dict[int, RametError] = {}
        if all([request.sampler.params.takes_best for request in requests]):
            tokens = self._choosing.argmax(logits)
            return Sampled(tokens, failures, *self._measure(logits, tokens, requests), requests, expected)
        aheads = _aheads(len(requests), ahead, expected)
        # A row that depends on tokens before it waits until the draft's token is known to be right.
        late = [i for i, token in enumerate(expected or ()) if token is not None and _adjusts(requests[i], aheads[i])]
        early = [i for i in range(len(requests)) if i not in late]
        tokens, followers = self._choose(logits, early, requests, aheads, failures)
        if late:
            tokens, followers = self._advance(tokens, followers), None
            tokens = tokens.new_full((len(requests),), NO_TOKEN).index_copy_(0, self._index(early), tokens)
        for i in late:
            before = int(tokens[i - 1])
            if expected is not None and before == expected[i] and not _ended(requests[i], before, aheads[i]):
                drafted = [token for token in expected[i + 1 - aheads[i] : i + 1] if token is not None]
                tokens[i] = self._advance(*self._choose(logits, [i], requests, aheads, failures, drafted))[0]
        if failures:
            tokens.index_fill_(0, self._index(list(failures)), NO_TOKEN)
        return Sampled(tokens, failures, *self._measure(logits, tokens, requests), requests, expected, followers)

    def _choose(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        requests: Sequence[Request],
        aheads: Sequence[int],
        failures: dict[int, RametError],
        drafted: Sequence[int] = (),
    ) -> tuple[torch.Tensor, Followers | None]:
        """Tokens of some rows, int64 [n], behind the draft's tokens `drafted`; adds errors of rows to `failures`.

        Also returns the requests whose grammars have to advance by these tokens.
        """
        choices = [TokenChoice(row, requests[row].sampler.params) for row in rows]
        adjusted = [(i, one) for i, one in enumerate(choices) if _adjusts(requests[one.row], aheads[one.row])]
        for _, one in adjusted:
            with noting(requests[one.row], one.row, failures):
                self._restrict(one, requests[one.row], aheads[one.row])
                if one.params.limited:
                    self._limit(one, requests[one.row], drafted)
        for one in choices:
            one.stream = self._stream(requests[one.row], aheads[one.row])
        tokens = self._choosing.choose(logits, choices)

        following: list[Follower] = []
        counted: list[tuple[int, Seen]] = []
        for i, one in adjusted:
            request = requests[one.row]
            if one.row in failures:
                continue
            if (grammar := request.sampler.grammar) is not None:
                following.append(Follower(i, one, request, aheads[one.row], grammar))
            elif one.seen is not None:
                counted.append((i, one.seen))
        # A list, because an operation on a tensor takes as long as dozens in Python.
        found = tokens.tolist() if any([seen.on_host for _, seen in counted]) else tokens
        for i, seen in counted:
            seen.add(found[i])
        return tokens, Followers(self, logits, following, failures) if following else None

    def _advance(self, tokens: torch.Tensor, followers: Followers | None) -> torch.Tensor:
        """Wait for tokens int64 [n] and let grammars advance by them; returns those that they accept."""
        if followers is None:
            return tokens
        found = tokens.tolist()
        followers.advance(found)
        return self._index(found)

    def draw_again(self, logits: torch.Tensor, choice: TokenChoice, request: Request, ahead: int) -> int:
        """A token of a row of logits by another random stream; waits for the device."""
        choice.stream = self._stream(request, ahead)
        return int(self._choosing.choose(logits, [choice]))

    def _restrict(self, choice: TokenChoice, request: Request, ahead: int) -> None:
        """Set penalties, the grammar's tokens and the minimum length."""
        state = request.sampler
        if state.params.penalised:
            if state.seen is None:
                state.seen = self._seen(request)
            choice.seen = state.seen
        choice.allowed = None if state.grammar is None else state.grammar.allowed()
        if choice.allowed is None and request.num_output + ahead < state.params.min_new_tokens:
            choice.barred = sorted(state.stop_ids)

    def _limit(self, choice: TokenChoice, request: Request, drafted: Sequence[int]) -> None:
        """Leave out tokens that are not allowed or would complete a bad word. Raises InvalidRequest if none is left."""
        allowed, words = choice.params.allowed_token_ids, request.message.bad_words
        left = np.ones(self.vocab_size, dtype=bool)
        if choice.allowed is not None:
            left = np.unpackbits(choice.allowed, bitorder="little", count=self.vocab_size).astype(bool)
        if allowed:
            left &= self._allowed(allowed)
        longest = max(map(len, words), default=0)
        output = [*request.tokens[max(request.prompt_len, len(request.tokens) - longest) :], *drafted]
        ends = [last for *before, last in words if output[max(len(output) - len(before), 0) :] == before]
        left[[*choice.barred, *ends]] = False
        if not left.any():
            raise InvalidRequest("no token may follow: allowed_token_ids and bad_words leave none", param="bad_words")
        choice.allowed = np.packbits(left, bitorder="little")

    def _allowed(self, ids: list[int]) -> np.ndarray:
        """A bool for each token. The requests of a body share the list, which may be long."""
        kept = self._allowed_by_list.get(id(ids))
        if kept is None or kept[0] is not ids:
            kept = ids, np.bincount(ids, minlength=self.vocab_size).astype(bool)
            self._allowed_by_list[id(ids)] = kept
        return kept[1]

    def _seen(self, request: Request) -> Seen:
        tokens = np.array(request.entry_tokens + request.tokens, dtype=np.int64)
        prompt, output = np.split(tokens, [request.num_prompt])
        prompt = prompt[prompt >= 0]  # those of images are not in the vocabulary
        counts = np.bincount(output, minlength=self.vocab_size)
        counts[counts > 0] += 1
        counts[prompt] = np.maximum(counts[prompt], 1)
        return Seen(counts, upload(torch.from_numpy(counts), self.device))

    def _measure(
        self, logits: torch.Tensor, tokens: torch.Tensor, requests: Sequence[Request]
    ) -> tuple[dict[int, int], Measured]:
        """`Sampled`'s `tops` and `measured` of the chosen tokens."""
        tops = {
            i: request.message.logprobs for i, request in enumerate(requests) if request.message.logprobs is not None
        }
        if not tops:
            return {}, []
        rows = list(tops)
        chosen = (tokens if len(rows) == len(tokens) else tokens[self._index(rows)]).clamp_min(0)
        return tops, self._choosing.measure(logits, rows, chosen, max(tops.values()))

    def report_logprobs(self, logits: torch.Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
        """The `TokenLogprob`s of n tokens from logits [n, vocab], each with the `top` likeliest tokens."""
        measured = self._choosing.measure(logits, range(len(tokens)), self._index(tokens), top)
        return list_logprobs(tokens, measured)

    def _index(self, index: Sequence[int]) -> torch.Tensor:
        return index_on(index, self.device)

    def _stream(self, request: Request, ahead: int) -> int | None:
        """The random stream of the next token; None if the request is greedy.

        With a seed, it depends only on the seed and the token's index, so a repeated step draws the same token.
        """
        params = request.sampler.params
        if params.greedy:
            return None
        if params.seed is None:
            return self._random.getrandbits(63)
        return _mix(params.seed, request.num_output + ahead)


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
