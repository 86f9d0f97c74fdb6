"""The drafter chooses the tokens that each running request verifies."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from radix import RadixTree
from runtime.batch import MOST_DRAFTED
from runtime.features.drafts.lookup import LEAST, Places, RecentOutputs, continuation
from runtime.features.drafts.pace import LEAST_GAIN, Acceptance, Pace, share_out
from runtime.request import Request, Work

# Most drafted rows of a request and of all, in a step.
LONGEST, _ROWS = MOST_DRAFTED, 128
# Lookups that cost about as much as one step. After lookups without gain, n requests pause for n / 8 steps.
_LOOKUPS = 8
# Tokens read from the tree at a time.
_TREE_TOKENS = 256
# After this many equal tokens, the text probably continues there even if one token differs.
_SURE = 4
_NONE = array("i")


@dataclass(slots=True)
class Draft:
    """A request's text and the state of its draft sources. Only the text array is mutated.

    Attributes:
        text: int32, prompt and output; `places` indexes its runs of tokens.
        ahead: int32, the tokens that follow this text in the tree.
        pause, paused: output tokens between two tree lookups; the pause grows while lookups fail.
        rates: acceptance rate by source.
        latest: the last draft found, verified or not.
        source: source of that draft; `source_at`: its index in `text`, or -1 if it is from elsewhere.
        equal: number of matching tokens before it.
    """

    text: array[int]
    places: Places = field(default_factory=Places)
    ahead: array[int] = field(default_factory=lambda: _NONE)
    pause: int = 1
    paused: int = 0
    rates: dict[Hashable, Acceptance] = field(default_factory=dict)
    latest: array[int] = field(default_factory=lambda: _NONE)
    source: Hashable = ""
    source_at: int = -1
    equal: int = 0


class Drafter:
    """Drafts from the tree, from the request's own text, and from recent outputs of its namespace.

    A drafted row costs step time and gains a token if it is accepted. The number of drafted rows follows from measured
    step times and from the acceptance rate of each source, for this request and for all requests.
    """

    def __init__(self, tree: RadixTree):
        self._tree = tree
        self._drafts: dict[Request, Draft] = {}
        self._recent = RecentOutputs()
        self._pace = Pace()
        self._rates: dict[Hashable, Acceptance] = {}
        self._idle = 0  # steps until the next lookup

    def propose(self, requests: Sequence[Request], room: int, beside: int) -> dict[Request, array[int]]:
        """Drafts for decoding requests. `room`: most drafted rows; `beside`: number of prompt rows in the step."""
        found = [(request, draft) for request in requests if (draft := self._find(request))]
        seconds = self._pace.seconds(len(requests), min(room, _ROWS), beside) if found else None
        drafts = [(self._rate(request).rate, len(draft)) for request, draft in found]
        lengths, gain = share_out(drafts, len(requests), seconds) if seconds else ([], 1.0)
        self._idle = 0 if gain >= LEAST_GAIN else len(requests) // _LOOKUPS
        if gain < LEAST_GAIN or (not beside and self._pace.due(len(requests), gain)):
            return {}
        return {request: draft[:n] for (request, draft), n in zip(found, lengths, strict=True) if n}

    def extend(self, work: Sequence[Work], step_tokens: int) -> None:
        """Add drafts to a step and allocate their pages, without retracting other requests.

        `step_tokens`: the most rows of the step.
        """
        decoding = [item for item in work if item.num_rows == 1 and not item.prefills]
        rows = sum([item.num_rows for item in work])
        if not decoding or rows >= step_tokens:
            return
        if self._idle:
            self._idle -= 1
            return
        proposed = self.propose([item.request for item in decoding], step_tokens - rows, _rows_of_prompts(work))
        for item in decoding if proposed else ():
            draft = proposed.get(item.request)
            if draft and item.request.lease.grow(ahead=len(draft)):
                item.add(draft)

    def note_step(self, work: Sequence[Work], seconds: float) -> None:
        """Record the duration of a step."""
        drafted, beside = sum([len(item.draft) for item in work]), _rows_of_prompts(work)
        prompts = sum([item.num_rows - len(item.draft) > 1 for item in work]) if beside else 0
        self._pace.note(len(work) - prompts, drafted, seconds, beside)

    def ended(self, request: Request, remember: bool) -> None:
        """Forget a request's drafts; with `remember`, others may repeat its output."""
        self._drafts.pop(request, None)
        if remember and request.num_output:
            self._recent.add(request.namespace, request.tokens[max(request.prompt_len - LEAST, 0) :])

    def clear(self) -> None:
        """Forget all outputs."""
        self._recent.clear()

    def _find(self, request: Request) -> array[int]:
        tokens = request.tokens
        limit = min(LONGEST, request.max_length - len(tokens) - 1)
        if limit < 1:
            return _NONE
        state = self._drafts.get(request)
        if state is None:
            state = self._drafts[request] = Draft(request.entry_tokens[:])
        text, places = state.text, state.places
        new = tokens[len(text) - len(request.entry_tokens) :]
        text.extend(new)
        places.follow(text)
        resumed = self._compare(state, new) if state.latest else -1
        best, state.source, state.source_at = self._from_tree(request, state, new)[:limit], "tree", -1
        at, state.equal = places.find(text, text)
        if not state.equal and not best and 0 < resumed < len(text):
            at = resumed
        if at and not (best and self._rate(request).rate >= self._rate_of(state, ("own", _grade(state.equal))).rate):
            best, state.source, state.source_at = _repeat(text, at, limit), ("own", _grade(state.equal)), at
        if not best:
            best, equal = self._recent.find(request.namespace, text, limit)
            state.source = ("recent", _grade(equal))
        if best and min(best) < 0:  # an image followed, whose tokens are not in the vocabulary
            best = array("i", takewhile(lambda token: token >= 0, best))
        state.latest = best
        return best

    def _compare(self, state: Draft, new: array[int]) -> int:
        """Record how many tokens of the latest draft match the `new` tokens, whether a step verified it or not.

        Returns:
            The index in the text at which the source probably continues, if only one token of `new` differs after a
            long match; -1: none.
        """
        if not (tried := min(len(state.latest), len(new))):
            return -1
        right = next((i for i in range(tried) if new[i] != state.latest[i]), tried)
        self._rate_of(state, state.source).note(right, tried)
        return state.source_at + len(new) if state.source_at >= 0 and (right or state.equal >= _SURE) else -1

    def _from_tree(self, request: Request, state: Draft, new: array[int]) -> array[int]:
        """Tokens that followed in the tree before the text's `new` tokens were appended."""
        if state.ahead:
            state.ahead = state.ahead[len(new) :] if state.ahead[: len(new)] == new else _NONE
        state.paused += 1
        if not state.ahead and state.paused >= state.pause:
            state.ahead = continuation(self._tree, request.key(len(request.tokens)), request.namespace, _TREE_TOKENS)
            state.pause, state.paused = 1 if state.ahead else min(2 * state.pause, _TREE_TOKENS), 0
        return state.ahead

    def _rate(self, request: Request) -> Acceptance:
        draft = self._drafts[request]
        return self._rate_of(draft, draft.source)

    def _rate_of(self, state: Draft, source: Hashable) -> Acceptance:
        if source not in state.rates:
            state.rates[source] = Acceptance(self._rates.setdefault(source, Acceptance()), memory=16)
        return state.rates[source]


def _rows_of_prompts(work: Sequence[Work]) -> int:
    """Rows of requests that compute several rows in this step; a single row costs as much as decoding."""
    return sum([rows for item in work if (rows := item.num_rows - len(item.draft)) > 1])


def _grade(equal: int) -> int:
    """Classes of matches, as longer ones are accepted more often: 0, 2, 3, 4, 5 to 7, 8 to 15, 16 tokens."""
    return equal if equal <= 4 else 2 + equal.bit_length()


def _repeat(text: array[int], at: int, limit: int) -> array[int]:
    """`limit` tokens from `at` on, repeated if the text ends before."""
    found = text[at : at + limit]
    return (found * (limit // len(found) + 1))[:limit]
