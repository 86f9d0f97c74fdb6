"""The drafter: which tokens each running request verifies beside the one that is known."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from radix import RadixTree
from runtime.request import Request, Work
from runtime.sampling.drafts.lookup import LEAST, Places, Recent, continuation
from runtime.sampling.drafts.pace import LEAST_GAIN, Acceptance, Pace, share_out

# Most drafted rows of a request and of all, in a step.
LONGEST, _ROWS = 32, 128
# Where a look has found nothing that pays, so many lookups are worth a step's wait.
_LOOKUPS = 8
# Tokens that are read from the tree at a time.
_TREE_TOKENS = 256
# Equal tokens before a place that make it likely that the text goes on there, even behind another token.
_SURE = 4
_NONE = array("i")


@dataclass(slots=True)
class _Draft:
    """A request's text and the state of its sources. No array is changed, but the text.

    Attributes:
        text: int32, the whole prompt and the output, and `places`, its runs.
        ahead: int32, what follows in the tree behind that.
        pause, paused: outputs between two looks into the tree, which grow while it finds nothing.
        rates: by source.
        latest: the draft that was found last, verified or not.
        source: of that draft, and `source_at`, where it stands in `text`; -1: it is from elsewhere.
        equal: tokens before it that are equal in the text.
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

    A draft costs rows of a step, and gives tokens where it is right. How many rows are worth it follows from the
    measured times of steps and from how often each source was right: for this request, and for all.
    """

    def __init__(self, tree: RadixTree):
        self._tree = tree
        self._recent = Recent()
        self._pace = Pace()
        self._rates: dict[Hashable, Acceptance] = {}
        self._idle = 0  # steps to come that do without a look

    def propose(self, requests: Sequence[Request], room: int, beside: int) -> dict[Request, array[int]]:
        """Drafts for requests that decode; `room`: rows that the step may have more; `beside`: those of prompts."""
        found = [(request, draft) for request in requests if (draft := self._find(request))]
        seconds = self._pace.seconds(len(requests), min(room, _ROWS), beside) if found else None
        drafts = [(self._rate(request).rate, len(draft)) for request, draft in found]
        lengths, gain = share_out(drafts, len(requests), seconds) if seconds else ([], 1.0)
        self._idle = 0 if gain >= LEAST_GAIN else len(requests) // _LOOKUPS
        if gain < LEAST_GAIN or (not beside and self._pace.due(len(requests), gain)):
            return {}
        return {request: draft[:n] for (request, draft), n in zip(found, lengths, strict=True) if n}

    def extend(self, work: Sequence[Work], step_tokens: int) -> None:
        """Add drafts to a step; their pages are allocated, without the retraction of others.

        `step_tokens`: rows that the step may have.
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
            if draft and item.request.strategy.grow(item.request, ahead=len(draft)):
                item.add(draft)

    def note_step(self, work: Sequence[Work], seconds: float) -> None:
        """Book the time of a step."""
        drafted, beside = sum([len(item.draft) for item in work]), _rows_of_prompts(work)
        prompts = sum([item.num_rows - len(item.draft) > 1 for item in work]) if beside else 0
        self._pace.note(len(work) - prompts, drafted, seconds, beside)

    def ended(self, request: Request) -> None:
        """Remember the output of a request that was served."""
        if request.num_output:
            self._recent.add(request.namespace, request.tokens[max(request.prompt_len - LEAST, 0) :])

    def clear(self) -> None:
        """Forget all outputs."""
        self._recent.clear()

    def _find(self, request: Request) -> array[int]:
        tokens = request.tokens
        limit = min(LONGEST, request.max_tokens - len(tokens) - 1)
        if limit < 1:
            return _NONE
        state = request.draft = request.draft or _Draft(request.entry_tokens[:])
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
        state.latest = best
        return best

    def _compare(self, state: _Draft, new: array[int]) -> int:
        """Book how far the latest draft was right, in `new` tokens: even one that no step verified shows that.

        Returns:
            Where in the text it may go on as before, if `new` has but one other token in a place that was surely the
            right one; -1: nowhere.
        """
        if not (tried := min(len(state.latest), len(new))):
            return -1
        right = next((i for i in range(tried) if new[i] != state.latest[i]), tried)
        self._rate_of(state, state.source).note(right, tried)
        return state.source_at + len(new) if state.source_at >= 0 and (right or state.equal >= _SURE) else -1

    def _from_tree(self, request: Request, state: _Draft, new: array[int]) -> array[int]:
        """Tokens behind this place in the tree, as known before the text's `new` tokens."""
        if state.ahead:
            state.ahead = state.ahead[len(new) :] if state.ahead[: len(new)] == new else _NONE
        state.paused += 1
        if not state.ahead and state.paused >= state.pause:
            state.ahead = continuation(self._tree, request.key(len(request.tokens)), request.namespace, _TREE_TOKENS)
            state.pause, state.paused = 1 if state.ahead else min(2 * state.pause, _TREE_TOKENS), 0
        return state.ahead

    def _rate(self, request: Request) -> Acceptance:
        return self._rate_of(request.draft, request.draft.source)

    def _rate_of(self, state: _Draft, source: Hashable) -> Acceptance:
        if source not in state.rates:
            state.rates[source] = Acceptance(self._rates.setdefault(source, Acceptance()), memory=16)
        return state.rates[source]


def _rows_of_prompts(work: Sequence[Work]) -> int:
    """Of those of which more than a row is computed; one row costs what decoding does."""
    return sum([rows for item in work if (rows := item.num_rows - len(item.draft)) > 1])


def _grade(equal: int) -> int:
    """The more tokens are equal, the likelier the next ones are, too: 0, 2, 3, 4, 5 and more, 8 and more, 16."""
    return equal if equal <= 4 else 2 + equal.bit_length()


def _repeat(text: array[int], at: int, limit: int) -> array[int]:
    """The tokens from `at` on, over and over where they are fewer than `limit`."""
    found = text[at : at + limit]
    return (found * (limit // len(found) + 1))[:limit]
