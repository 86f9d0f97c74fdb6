"""Prefix caching of models with recurrent layers: a request resumes at the nearest point whose state is stored."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from radix import Match, Namespace, Node, nearest, text
from radix.node import common_tokens
from runtime.batch import RowSet, StateRows
from runtime.features.hybrid.places import Uses, choose, ends_of_turns, least_saving
from runtime.features.hybrid.points import Behind, Point, Points
from runtime.kv.cache import PagedCache
from runtime.kv.segments import Run
from runtime.kv.states import StatePool
from runtime.request import Found, Lease, Request, Work
from runtime.reuse.prefix import PrefixLease, PrefixStrategy

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
        slot: slot with the state after `num_computed - accepted` tokens; the next step computes the rest again.
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


class HybridLease(PrefixLease):
    """Resumes at a point of the tree, and leaves points where later requests are likely to resume.

    Steps write states into a second slot of the request, so that a step can be run again, or dropped.
    """

    strategy: HybridPrefix
    _state: _State | None = None  # of a running request

    @property
    def state(self) -> _State:
        assert self._state is not None
        return self._state

    # -- look-up ---------------------------------------------------------------------------------------------

    def look(self) -> Found:
        request = self.request
        if not self.cache.enabled:
            return Found(0, Resumption())
        tree, page_size, key = self.cache.tree, self.cache.page_size, request.key(self._most())
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

    def reads(self) -> list[Run]:
        """The KV, then the points within it that may have been stored."""
        missing = [self._run(place) for place in self._likely(self.look())]
        return [*super().reads(), *missing]

    def _run(self, place: int) -> Run:
        return self.strategy.points.run(self.request.tokens[:place], self.request.namespace)

    def _likely(self, found: Found) -> list[int]:
        """Places where earlier requests may have left points, nearer than the one that was found."""
        turns = ends_of_turns(self.request.tokens[: self.request.prompt_len], self.strategy.stops)[-_RECALLED:]
        # An answer's point is before the token that ended it.
        places = {*self.places_for(found), *turns, *(end - 1 for end in turns)}
        last = min(_known_of(found) + _BLOCK, self._most())
        return sorted(place for place in places if found.tokens + self.strategy.least <= place <= last)

    def peer(self, found: Found, computing: Sequence[Lease]) -> tuple[Request, int] | None:
        """A running request that shares enough of its coming tokens. `expect` lets it leave a point where both part."""
        request = self.request
        if not self.cache.enabled or request.wants_prompt_logprobs:
            return None
        key = request.key(self._most())
        for lease in computing:
            assert isinstance(lease, HybridLease)
            other = lease.request
            done = max(other.sequence.num_computed, found.tokens + self.strategy.least - 1)
            if request.namespace != other.namespace or request.tokens[:8] != other.tokens[:8]:
                continue
            shared = common_tokens(key, 0, other.key(len(other.tokens)))
            places = [place for place in lease.state.places if done < place <= shared]
            if shared > done and shared - max(places, default=found.tokens) >= self.strategy.least:
                places.append(shared)
            if places:
                return other, max(places)
        return None

    def expect(self, place: int) -> None:
        if place not in self.state.places:
            insort(self.state.places, place)

    # -- admission -------------------------------------------------------------------------------------------

    def admit(self, found: Found, headroom: int) -> bool:
        request = self.request
        cut = found.match
        assert isinstance(cut, Resumption)
        if self.cache.pages_for(len(request.tokens)) - len(cut.pages) + headroom > self.cache.num_available:
            return False
        state = _State(self.strategy.free.pop(), self.strategy.free.pop(), found.tokens)
        is_admitted = False
        try:
            # Before pages are allocated, which may evict the point.
            if cut.point is None:
                self.strategy.states.clear(state.slot)
            else:
                self.strategy.points.load(cut.point, state.slot)
            is_admitted = super().admit(found, headroom)
        finally:
            if not is_admitted:
                self.strategy.free += state.slot, state.spare
        if is_admitted:
            self._state = state
            self.strategy.counters["resumes"] += cut.point is not None
            if self.cache.enabled and request.message.store:
                state.places = self.places_for(found)
            self._explain(found)
        return is_admitted

    def _explain(self, found: Found) -> None:
        """Report the point, and a nearer one that has left the tree."""
        lookup, gone, page_size = self.request.event.lookup, self.cache.gone, self.cache.page_size
        if lookup is None or gone is None:
            return
        lookup.point = found.tokens
        for place in reversed(self._likely(found)):
            key = self._run(place).tokens.tobytes()
            if (left := gone.find(key, place // page_size, self.request.namespace)) is not None:
                lookup.lost, lookup.why, lookup.gone_s = place, left.why, self.cache.tree.now() - left.at_s
                break

    def _use(self, match: Match, node: Node | None) -> None:
        assert isinstance(match, Resumption)
        point = match.point
        if point is not None and isinstance(point.meta, Point) and not point.hits:
            self.strategy.uses.used(point.meta.behind)
        super()._use(match, node if point is None or point.parent is None else point)

    def places_for(self, found: Found) -> list[int]:
        """Places at which points are wanted."""
        request = self.request
        turns = ends_of_turns(request.tokens[: request.prompt_len], self.strategy.stops)
        end, known = request.prompt_len - request.wants_tokens, _known_of(found)
        most = len(request.tokens)
        return choose(found.tokens, end, turns, self._asked(), known, self.strategy.points.cost, most)

    def _asked(self) -> list[int]:
        """Places of the request's breakpoints; for a request without output, such as that of a pin, also its end."""
        request = self.request
        asked = [end for end, _ in request.message.breakpoints or ()]
        return asked if request.wants_tokens else [*asked, request.prompt_len]

    # -- steps -----------------------------------------------------------------------------------------------

    def rows(self, work: Work) -> list[RowSet]:
        (one,) = super().rows(work)
        one.state = self.take_slots(work)
        return [one]

    def take_slots(self, work: Work) -> StateRows:
        """Also takes the slots of states within the work; those of an earlier try are given back."""
        state = self._state
        assert state is not None
        if work.ahead:  # the step before, which is not booked yet, leaves its state in `spare`
            return StateRows(0, work.count, state.spare, state.slot)
        self._give_back(state)
        inner = [place for place in state.places if work.start < place < work.start + work.count]
        free = self.strategy.free
        state.saving = [(place, free.pop()) for place in inner[-len(free) :] if free]
        saves = [(place - work.start - 1, slot) for place, slot in state.saving]
        return StateRows(0, work.count, state.slot, state.spare, saves, len(work.draft), state.accepted)

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        gives_tokens = super().book(work, saved, seconds)
        request, state = work.request, self._state
        assert state is not None
        state.slot, state.spare, state.accepted = state.spare, state.slot, len(work.draft)
        state.seconds += seconds
        if state.places:
            done, last = request.sequence.num_computed, state.places[-1]
            for place, slot in state.saving:
                self._store(place, slot, "prompt" if place == last else "")
            if done in state.places and not state.accepted:
                self._store(done, state.slot, "prompt" if done == last else "")
            state.places = [place for place in state.places if place > done]
            self._give_back(state)
        return gives_tokens

    def _give_back(self, state: _State) -> None:
        self.strategy.free += [slot for _, slot in state.saving]
        state.saving = []

    def release(self, keep: bool) -> None:
        request = self.request
        state = self._state
        try:
            if state is not None and keep and self.cache.enabled and request.message.store:
                self._commit()
                place = request.sequence.num_computed - state.accepted
                if place - state.last >= self.strategy.least:
                    self._store(place, state.slot, "answer")
                if state.latest is not None and state.latest.parent is not None:
                    self.cache.hold(state.latest, request.message.hold_s)
            super().release(keep)
        finally:
            if state is not None:
                self._give_back(state)
                self.strategy.free += state.slot, state.spare
                self._state = None

    def _store(self, place: int, slot: int, behind: Behind) -> None:
        """Store a point if there is room for it, and let those before it go first which it makes superfluous."""
        state = self.state
        point = self.strategy.points.store(self.request, place, behind, slot, state.seconds)
        if point is None:
            return
        self.strategy.counters["points_stored"] += 1
        self.strategy.uses.stored(behind)
        vain = self.strategy.uses.vain() if behind == "answer" else "prompt"
        self._retire((point, None if vain == "prompt" else state.latest), place)
        if vain == "answer":
            self.cache.tree.spares.add(point)
        state.last, state.seconds, state.latest = place, 0.0, point

    def _retire(self, kept: tuple[Node, Node | None], place: int) -> None:
        """Let the points before a place go first that only this conversation uses, except those in `kept`.

        They are behind the last place at which the tree branches, and are no meeting points of earlier conversations.
        """
        tree, node = self.cache.tree, kept[0].parent
        key = self.request.key(place)
        end = place // tree.page_size * tree.page_size * 4
        while node is not None and len(node.children) - node.num_attached <= 1:
            for child in node.children.values() if node.num_attached else ():
                is_before = child.is_attached and child not in kept and key.startswith(text(child.key), end)
                if is_before and child.hits < _SHARED:
                    tree.spares.add(child)
            end -= len(node.key)
            node = node.parent


class HybridPrefix(PrefixStrategy[None]):
    """Exact prefix caching of models with recurrent layers.

    KV is shared as by `PrefixStrategy`, but rows can be computed only behind a known state.

    Attributes:
        points: stores states in the tree.
        states: the states of running requests, and within steps; `free`: its unused slots.
        stops: tokens that end a turn.
        least: least number of tokens between two points.
        uses: how often points of each kind were used.
    """

    counted = ("resumes", "points_stored")

    def __init__(self, cache: PagedCache, num_layers: int, states: StatePool, stops: Collection[int]):
        """`stops`: tokens that end a turn."""
        super().__init__(cache, num_layers)
        self.points = Points(cache, states)
        self.states, self.stops = states, stops
        self.free = list(range(states.num_slots))
        self.least = least_saving(self.points.cost)
        self.uses = Uses()

    def open(self, request: Request, ask: None) -> HybridLease:
        return HybridLease(self, request)

    def runs(self, tokens: array[int], namespace: Namespace, ask: None = None) -> list[Run]:
        return [self.points.run(tokens, namespace) if tokens else Run(tokens, namespace)]


def _known_of(found: Found) -> int:
    """See `Resumption`."""
    assert isinstance(found.match, Resumption)
    return found.match.known
