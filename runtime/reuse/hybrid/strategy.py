"""Prefix caching of models with recurrent layers: a request resumes at the nearest point whose state is stored."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from radix import Match, Namespace, Node, nearest, text
from radix.node import common_tokens
from runtime.batch import RowSet, StateRows
from runtime.kv.cache import PagedCache
from runtime.kv.segments import Run
from runtime.kv.states import StatePool
from runtime.request import Found, Request, Work
from runtime.reuse.hybrid.places import Uses, choose, ends_of_turns, least_saving
from runtime.reuse.hybrid.points import Behind, Point, Points
from runtime.reuse.prefix import PrefixStrategy

# Ends of turns at which earlier requests of a conversation may have left points that a tier can load.
_RECALLED = 4
# A tier may have a point whose last tokens before it are not in the tree: the most tokens of a tier's block.
_BLOCK = 64
# A point that was used so often is not only one conversation's.
_SHARED = 2


@dataclass(slots=True)
class Resumption(Match):
    """A match that is cut back to its nearest point.

    Attributes:
        point: the point; None: there is none, and the match is empty.
        known: number of leading tokens whose KV the tree has.
    """

    point: Node | None = None
    known: int = 0


@dataclass(slots=True)
class _State:
    """The state of a running request.

    Attributes:
        slot: slot with the state behind the computed tokens, without the last `accepted` of them.
        spare: slot for the state after the next step.
        places: places behind the computed tokens at which points are wanted, ascending.
        last: place of the latest point.
        saving: places within the current step, and the slots for their states.
        seconds: time of the rows since the latest point.
        latest: the latest point.
    """

    slot: int
    spare: int
    last: int
    accepted: int = 0
    places: list[int] = field(default_factory=list)
    saving: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0
    latest: Node | None = None


class HybridPrefix(PrefixStrategy):
    """Exact prefix caching of models with recurrent layers.

    KV is shared as by `PrefixStrategy`, but rows can be computed only behind a known state. So a request resumes at a
    point of the tree, and leaves points where later requests are likely to resume. Steps write states into a second
    slot of the request, so that a step can be run again, or dropped.
    """

    counted = ("resumes", "points_stored")

    def __init__(self, cache: PagedCache, num_layers: int, states: StatePool, stops: Collection[int]):
        """`stops`: tokens that end a turn."""
        super().__init__(cache, num_layers)
        self.points = Points(cache, states)
        self._states, self._stops = states, stops
        self._free = list(range(states.num_slots))
        self._least = least_saving(self.points.cost)
        self._uses = Uses()

    # -- look-up ---------------------------------------------------------------------------------------------

    def find(self, request: Request) -> Found:
        if not self.cache.enabled:
            return Found(0, Resumption())
        tree, page_size, key = self.cache.tree, self.cache.page_size, request.key(self._most(request))
        match = tree.match(key, request.namespace)
        point, length = nearest(key, match, tree.root(request.namespace), page_size)
        known = len(match.pages) * page_size + match.partial_rows
        if point is None or point.parent is None:
            return Found(0, Resumption(known=known))
        whole, rows = divmod(length, page_size)
        cut = Resumption(match.pages[:whole], point.parent if whole else None, len(point.parent.pages))
        cut.point, cut.known = point, known
        if rows:
            cut.partial_page, cut.partial_rows, cut.partial_node = point.pages[0], rows, point
        return Found(length, cut)

    def runs(self, tokens: array[int], namespace: Namespace, asked: dict[str, Any]) -> list[Run]:
        return [self.points.run(tokens, namespace) if tokens else Run(tokens, namespace)]

    def reads(self, request: Request) -> list[Run]:
        """The KV, then the points within it that may have been stored."""
        missing = [self._run(request, place) for place in self._likely(request, self.find(request))]
        return [*super().reads(request), *missing]

    def _run(self, request: Request, place: int) -> Run:
        return self.points.run(request.tokens[:place], request.namespace)

    def _likely(self, request: Request, found: Found) -> list[int]:
        """Places where earlier requests may have left points, nearer than the one that was found."""
        turns = ends_of_turns(request.tokens[: request.prompt_len], self._stops)[-_RECALLED:]
        # An answer's point is before the token that ended it.
        places = {*self._places(request, found), *turns, *(end - 1 for end in turns)}
        last = min(found.detail.known + _BLOCK, self._most(request))
        return sorted(place for place in places if found.tokens + self._least <= place <= last)

    def peer(self, request: Request, found: Found, computing: Sequence[Request]) -> tuple[Request, int] | None:
        """A running request that shares enough of its coming tokens. It leaves a point where both part."""
        if not self.cache.enabled or request.wants_prompt_logprobs:
            return None
        key = request.key(self._most(request))
        for other in computing:
            done = max(other.sequence.num_computed, found.tokens + self._least - 1)
            if request.namespace != other.namespace or request.tokens[:8] != other.tokens[:8]:
                continue
            shared = common_tokens(key, 0, other.key(len(other.tokens)))
            places = [place for place in other.reuse.places if done < place <= shared]
            if shared > done and shared - max(places, default=found.tokens) >= self._least:
                insort(other.reuse.places, shared)
                places.append(shared)
            if places:
                return other, max(places)
        return None

    # -- admission -------------------------------------------------------------------------------------------

    def admit(self, request: Request, found: Found, headroom: int) -> bool:
        cut: Resumption = found.detail
        if self.cache.pages_for(len(request.tokens)) - len(cut.pages) + headroom > self.cache.num_available:
            return False
        state = _State(self._free.pop(), self._free.pop(), found.tokens)
        is_admitted = False
        try:
            # Before pages are allocated, which may evict the point.
            if cut.point is None:
                self._states.clear(state.slot)
            else:
                self.points.load(cut.point, state.slot)
            is_admitted = super().admit(request, found, headroom)
        finally:
            if not is_admitted:
                self._free += state.slot, state.spare
        if is_admitted:
            request.reuse = state
            self.counters["resumes"] += cut.point is not None
            if self.cache.enabled and request.message.store:
                state.places = self._places(request, found)
            self._explain(request, found)
        return is_admitted

    def _explain(self, request: Request, found: Found) -> None:
        """Report the point, and a nearer one that has left the tree."""
        lookup, gone, page_size = request.event.lookup, self.cache.gone, self.cache.page_size
        if lookup is None or gone is None:
            return
        lookup.point = found.tokens
        for place in reversed(self._likely(request, found)):
            key = self._run(request, place).tokens.tobytes()
            if (left := gone.find(key, place // page_size, request.namespace)) is not None:
                lookup.lost, lookup.why, lookup.gone_s = place, left.why, self.cache.tree.now() - left.at_s
                break

    def _use(self, request: Request, match: Match, node: Node | None) -> None:
        assert isinstance(match, Resumption)
        point = match.point
        if point is not None and isinstance(point.meta, Point) and not point.hits:
            self._uses.used(point.meta.behind)
        super()._use(request, match, node if point is None or point.parent is None else point)

    def _places(self, request: Request, found: Found) -> list[int]:
        turns = ends_of_turns(request.tokens[: request.prompt_len], self._stops)
        end, known = request.prompt_len - request.wants_tokens, found.detail.known
        most = len(request.tokens)
        return choose(found.tokens, end, turns, self._asked(request), known, self.points.cost, most)

    def _asked(self, request: Request) -> list[int]:
        """Places of the request's breakpoints; for a request without output, such as that of a pin, also its end."""
        asked = [end for end, _ in request.message.breakpoints or ()]
        return asked if request.wants_tokens else [*asked, request.prompt_len]

    # -- steps -----------------------------------------------------------------------------------------------

    def rows(self, work: Work) -> list[RowSet]:
        (one,) = super().rows(work)
        one.state = self.state(work)
        return [one]

    def state(self, work: Work) -> StateRows:
        """Also chooses the slots of states within the work; they are chosen anew if the work is run again."""
        state: _State = work.request.reuse
        if work.ahead:  # the step before, which is not booked yet, leaves its state in `spare`
            return StateRows(0, work.count, state.spare, state.slot)
        self._give_back(state)
        inner = [place for place in state.places if work.start < place < work.start + work.count]
        state.saving = [(place, self._free.pop()) for place in inner[-len(self._free) :] if self._free]
        saves = [(place - work.start - 1, slot) for place, slot in state.saving]
        return StateRows(0, work.count, state.slot, state.spare, saves, len(work.draft), state.accepted)

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        gives_tokens = super().book(work, saved, seconds)
        request, state = work.request, work.request.reuse
        state.slot, state.spare, state.accepted = state.spare, state.slot, len(work.draft)
        state.seconds += seconds
        if state.places:
            done, last = request.sequence.num_computed, state.places[-1]
            for place, slot in state.saving:
                self._store(request, place, slot, "prompt" if place == last else "")
            if done in state.places and not state.accepted:
                self._store(request, done, state.slot, "prompt" if done == last else "")
            state.places = [place for place in state.places if place > done]
            self._give_back(state)
        return gives_tokens

    def _give_back(self, state: _State) -> None:
        self._free += [slot for _, slot in state.saving]
        state.saving = []

    def release(self, request: Request, keep: bool) -> None:
        state: _State | None = request.reuse
        try:
            if state is not None and keep and self.cache.enabled and request.message.store:
                self._commit(request)
                place = request.sequence.num_computed - state.accepted
                if place - state.last >= self._least:
                    self._store(request, place, state.slot, "answer")
                if state.latest is not None and state.latest.parent is not None:
                    self.cache.hold(state.latest, request.message.hold_s)
            super().release(request, keep)
        finally:
            if state is not None:
                self._give_back(state)
                self._free += state.slot, state.spare
                request.reuse = None

    def _store(self, request: Request, place: int, slot: int, behind: Behind) -> None:
        """Store a point if there is room for it, and let those before it go first which it makes superfluous."""
        state: _State = request.reuse
        point = self.points.store(request, place, behind, slot, state.seconds)
        if point is None:
            return
        self.counters["points_stored"] += 1
        self._uses.stored(behind)
        vain = self._uses.vain() if behind == "answer" else "prompt"
        self._retire(request, (point, None if vain == "prompt" else state.latest), place)
        if vain == "answer":
            self.cache.tree.spares.add(point)
        state.last, state.seconds, state.latest = place, 0.0, point

    def _retire(self, request: Request, kept: tuple[Node, Node | None], place: int) -> None:
        """Let the points before a place go first that only this conversation uses, except those in `kept`.

        They are behind the last place at which the tree branches, and are no meeting points of earlier conversations.
        """
        tree, node = self.cache.tree, kept[0].parent
        key = request.key(place)
        end = place // tree.page_size * tree.page_size * 4
        while node is not None and len(node.children) - node.num_attached <= 1:
            for child in node.children.values() if node.num_attached else ():
                is_before = child.is_attached and child not in kept and key.startswith(text(child.key), end)
                if is_before and child.hits < _SHARED:
                    tree.spares.add(child)
            end -= len(node.key)
            node = node.parent
