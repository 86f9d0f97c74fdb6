"""Who waits, in the order in which they should be admitted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from sortedcontainers import SortedKeyList

from radix import Namespace
from runtime.config import SchedulePolicy
from runtime.request import Request

# Waiting requests that are matched anew in one pass, at most, after something was computed that they may share.
_REFRESHED = 16

# Credit for overtaking that can be saved up: in full steps, and in places among those that run.
_MOST_STEPS, _MOST_PLACES = 4, 4.0

# Weight of the request that ended last in the mean of what requests generate.
_LATEST = 0.05

_Family = tuple[Namespace, bytes]


class Waiting:
    """A queue whose order follows a policy; every operation takes O(log n), whatever waits.

    - `fcfs`: by arrival.
    - `priority`: by priority, then arrival. In the policies below, too, a higher priority goes first.
    - `lpm`: longest match first.
    - `dfs`: neighbours in the tree follow each other.
    - `balanced`: by arrival, but a share of the work goes to the longest match. Each admission in order earns credit in
      proportion to the rows that it has to compute, those of its prompt and as many more as requests generated lately;
      whoever overtakes spends as many as it has to compute. So those of which nearly all is cached get through while
      they still find it there, and nobody waits more than 1 / (1 - share) times as long as by arrival, and 4 full
      steps. Places are earned and spent in the same way while they are scarce.

    What the tree has of a request is looked up when it comes, when it could be admitted, and, for a bounded number of
    requests per pass, after another one with the same first page was computed.

    Args:
        policy: see above.
        overtake_share: for `balanced`, between 0 and 1.
        step_tokens: rows of a full step, the unit of what credit can be saved up.
        page_size: tokens in a page.
        match: how many tokens of a request the tree has now.
    """

    def __init__(
        self,
        policy: SchedulePolicy,
        overtake_share: float,
        step_tokens: int,
        page_size: int,
        match: Callable[[Request], int],
    ) -> None:
        self._order: SortedKeyList = SortedKeyList(key=_RANKS[policy])
        self._matches: SortedKeyList | None = SortedKeyList(key=lambda request: request.rank)
        if policy not in ("lpm", "balanced"):
            self._matches = None
        self._lpm = policy == "lpm"
        self._earned = overtake_share / (1 - overtake_share)
        self._most_tokens = float(_MOST_STEPS * step_tokens)
        self._tokens, self._places = self._most_tokens, _MOST_PLACES
        self._generated = 0.0
        self._page_size = page_size
        self._match = match
        self._families: dict[_Family, OrderedDict[Request, None]] = {}
        self._stale: dict[_Family, int] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._order)

    def candidates(self, scarce: Callable[[], bool]) -> Iterator[Request]:
        """Those to be admitted, the next one first, each once; `scarce`: whether the next place is the last one."""
        passed: set[Request] = set()
        while (request := self._next(passed, scarce)) is not None:
            passed.add(request)
            yield request

    def _next(self, passed: set[Request], scarce: Callable[[], bool]) -> Request | None:
        if self._matches is None:
            return _first(self._order, passed)
        best = _first(self._matches, passed)
        if best is None or self._lpm or (self._cost(best) <= self._tokens and (self._places >= 1 or not scarce())):
            return best
        return _first(self._order, passed)

    def add(self, request: Request) -> None:
        """Let a request wait."""
        self._order.add(request)
        if self._matches is not None:
            request.matched_tokens = self._match(request)
            request.rank = _match_rank(request)
            self._matches.add(request)
            self._families.setdefault(self._family(request), OrderedDict())[request] = None

    def remove(self, request: Request) -> None:
        """Take a request out. Raises ValueError if it does not wait."""
        self._order.remove(request)
        if self._matches is not None:
            self._matches.remove(request)
            family = self._family(request)
            del self._families[family][request]
            if not self._families[family]:
                del self._families[family]
                self._stale.pop(family, None)

    def admit(self, request: Request, scarce: bool) -> None:
        """Take out a request that is let in, and book what it earns or spends."""
        if self._matches is not None and not self._lpm:
            in_order, cost = request is self._order[0], self._cost(request)
            self._tokens = min(self._tokens + (self._earned * cost if in_order else -cost), self._most_tokens)
            if scarce:
                self._places = min(self._places + (self._earned if in_order else -1), _MOST_PLACES)
        self.remove(request)

    def rank_again(self, request: Request, matched_tokens: int) -> bool:
        """Book what the tree has of a waiting request now; whether it lost its turn by that."""
        if self._matches is None or matched_tokens == request.matched_tokens:
            return False
        self._matches.remove(request)
        before, request.matched_tokens = request.rank, matched_tokens
        request.rank = _match_rank(request)
        self._matches.add(request)
        return request.rank > before and (self._lpm or request is not self._order[0])

    def ended(self, request: Request) -> None:
        """A running request has ended: what those that wait will generate is judged by it."""
        self._generated += _LATEST * (len(request.tokens) - request.prompt_len - self._generated)

    def computed(self, request: Request) -> None:
        """A running request's KV has come into the tree: those that begin like it may find more now."""
        family = self._family(request)
        if family in self._families:
            self._stale[family] = len(self._families[family])

    def refresh(self) -> None:
        """Match some of those again for whom there may be more in the tree; the others have their turn later."""
        budget = _REFRESHED
        for family, count in list(self._stale.items()):
            members = self._families[family]
            for request in list(islice(members, min(count, budget))):
                members.move_to_end(request)
                self.rank_again(request, self._match(request))
            if count > budget:
                self._stale[family] = count - budget
                return
            budget -= count
            del self._stale[family]

    def _family(self, request: Request) -> _Family:
        return request.namespace, request.key(self._page_size)

    def _cost(self, request: Request) -> float:
        return len(request.tokens) - request.matched_tokens + self._generated


def _first(order: SortedKeyList, passed: set[Request]) -> Request | None:
    return next((request for request in order if request not in passed), None)


def _match_rank(request: Request) -> Any:
    return -request.priority, -request.matched_tokens, request.sequence


_RANKS: dict[SchedulePolicy, Callable[[Request], Any]] = {
    "fcfs": lambda request: request.sequence,
    "priority": lambda request: (-request.priority, request.sequence),
    "lpm": lambda request: (-request.priority, request.sequence),
    "dfs": lambda request: (-request.priority, request.namespace, request.key(len(request.tokens)), request.sequence),
    "balanced": lambda request: (-request.priority, request.sequence),
}
