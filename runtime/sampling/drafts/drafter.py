"""The drafter: which tokens each running request verifies beside the one that is known."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from radix import RadixTree
from runtime.request import Request, Work
from runtime.sampling.drafts.lookup import LEAST, Places, Recent, continuation
from runtime.sampling.drafts.pace import Acceptance, Pace, share_out

# Most drafted rows of a request and of all, in a step.
LONGEST, _ROWS = 32, 64
# Tokens that are read from the tree at a time.
_TREE_TOKENS = 256
# Every so many steps one runs without drafts, so that their cost stays known; a request that drafts nothing, though it
# could, tries a token or two as often.
_PROBE = 64
_PROBED = 2


@dataclass(slots=True)
class _Draft:
    """A request's text and the state of its sources.

    Attributes:
        text: int32, the whole prompt and the output, and `places`, its runs.
        ahead: int32, what followed in the tree from index `ahead_at` of the request's tokens on.
        pause, paused: outputs between two looks into the tree, which grow while it finds nothing.
        rates: by source.
        source: of the latest draft, and `source_at`, where it stands in `text`; -1: it is from elsewhere.
        idle: steps since one had a draft that was left out.
    """

    text: array[int]
    places: Places = field(default_factory=Places)
    ahead: array[int] = field(default_factory=lambda: array("i"))
    ahead_at: int = 0
    pause: int = 1
    paused: int = 0
    rates: dict[Hashable, Acceptance] = field(default_factory=dict)
    source: Hashable = ""
    source_at: int = -1
    idle: int = 0


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
        self._steps = 0

    def propose(self, requests: Sequence[Request], room: int, beside: int) -> dict[Request, array[int]]:
        """Drafts for requests that decode; `room`: rows that the step may have more; `beside`: those of prompts."""
        self._steps += 1
        found = {request: draft for request in requests if (draft := self._find(request))}
        if not found or self._steps % _PROBE == 0:
            return {}
        room = min(room, _ROWS)
        seconds = self._pace.seconds(len(requests), room, beside)
        if seconds is None:
            return {}
        chances = [self._rate(request).rate ** np.arange(1, len(draft) + 1) for request, draft in found.items()]
        lengths = share_out(chances, len(requests), seconds)
        for i, request in enumerate(found):
            state = request.draft
            state.idle = 0 if lengths[i] else state.idle + 1
            if state.idle >= _PROBE and (left := room - sum(lengths)):
                state.idle, lengths[i] = 0, min(left, _PROBED)
        return {request: draft[:n] for (request, draft), n in zip(found.items(), lengths, strict=True) if n}

    def extend(self, work: Sequence[Work], step_tokens: int) -> None:
        """Add drafts to a step; their pages are allocated, without the retraction of others.

        `step_tokens`: rows that the step may have.
        """
        decoding = [item for item in work if not item.prefills]
        rows = sum(item.num_rows for item in work)
        if not decoding or rows >= step_tokens:
            return
        proposed = self.propose([item.request for item in decoding], step_tokens - rows, rows - len(decoding))
        for item in decoding:
            draft = proposed.get(item.request)
            if draft and item.request.strategy.grow(item.request, ahead=len(draft)):
                item.add(draft)

    def note(self, work: Work, drafted: int) -> None:
        """Book how far a draft was right: `work.draft` holds what was accepted of `drafted` tokens."""
        right = len(work.draft)
        work.request.drafted += drafted
        work.request.accepted += right
        self._rate(work.request).note(right, drafted)
        state = work.request.draft
        if state.source_at >= 0:
            state.source_at += right + 1

    def note_step(self, work: Sequence[Work], seconds: float) -> None:
        """Book the time of a step."""
        beside = [item.num_rows for item in work if item.prefills]
        self._pace.note(len(work) - len(beside), sum(len(item.draft) for item in work), seconds, sum(beside))

    def ended(self, request: Request) -> None:
        """Remember the output of a request that was served."""
        if request.num_output:
            self._recent.add(request.namespace, request.tokens[max(request.prompt_len - LEAST, 0) :])

    def clear(self) -> None:
        """Forget all outputs."""
        self._recent.clear()

    def _find(self, request: Request) -> array[int]:
        limit = min(LONGEST, request.max_tokens - len(request.tokens) - 1)
        if limit < 1:
            return array("i")
        state = request.draft = request.draft or _Draft(request.entry_tokens[:])
        state.text.extend(request.tokens[len(state.text) - len(request.entry_tokens) :])
        state.places.follow(state.text)
        # Where a draft was wrong, the text may have had another token in its place, and go on as before.
        resumed, state.source_at = state.source_at, -1
        best, state.source = self._from_tree(request, state)[:limit], "tree"
        at, equal = state.places.find(state.text, state.text)
        if not equal and not best and 0 < resumed < len(state.text):
            at = resumed
        if at and not (best and self._rate(request).rate >= self._rate_of(state, ("own", _grade(equal))).rate):
            best, state.source, state.source_at = _repeat(state.text, at, limit), ("own", _grade(equal)), at
        if not best:
            best, equal = self._recent.find(request.namespace, state.text, limit)
            state.source = ("recent", _grade(equal))
        return best

    def _from_tree(self, request: Request, state: _Draft) -> array[int]:
        tokens = request.tokens
        new = tokens[state.ahead_at :]
        if state.ahead and state.ahead[: len(new)] == new:
            del state.ahead[: len(new)]
        else:
            del state.ahead[:]
        state.ahead_at = len(tokens)
        state.paused += 1
        if not state.ahead and state.paused >= state.pause:
            state.ahead = continuation(self._tree, request.key(len(tokens)), request.namespace, _TREE_TOKENS)
            state.pause, state.paused = 1 if state.ahead else min(2 * state.pause, _TREE_TOKENS), 0
        return state.ahead

    def _rate(self, request: Request) -> Acceptance:
        return self._rate_of(request.draft, request.draft.source)

    def _rate_of(self, state: _Draft, source: Hashable) -> Acceptance:
        if source not in state.rates:
            state.rates[source] = Acceptance(self._rates.setdefault(source, Acceptance()), memory=16)
        return state.rates[source]


def _grade(equal: int) -> int:
    """The more tokens are equal, the likelier the next ones are, too: 0, 2, 3, 4, 5 and more, 8 and more, 16."""
    return equal if equal <= 4 else 2 + equal.bit_length()


def _repeat(text: array[int], at: int, limit: int) -> array[int]:
    """The tokens from `at` on, over and over where they are fewer than `limit`."""
    found = text[at : at + limit]
    return (found * (limit // len(found) + 1))[:limit]
