"""Who waits, in the order in which they should be admitted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from sortedcontainers import SortedKeyList

from runtime.config import SchedulePolicy
from runtime.request import Request

# Waiting requests that are matched anew in one pass, at most, after something was computed that they may share.
_REFRESHED = 64

# Tokens to compute with which a request has no advantage over one that came `max_overtake` seconds later.
_DEAR_TOKENS = 4096

_Family = tuple[str, bytes]


class Waiting:
    """A queue whose order follows a policy; every operation takes O(log n), whatever waits.

    - `fcfs`: by arrival.
    - `priority`: by priority, then arrival. In the policies below, too, a higher priority goes first.
    - `lpm`: longest match first.
    - `dfs`: neighbours in the tree follow each other.
    - `balanced`: by arrival plus up to `max_overtake` seconds in proportion to the tokens that are left to compute. So
      nobody is overtaken by a request that came more than `max_overtake` seconds later, and no key changes with time.

    What the tree has of a request is looked up when it comes, when it could be admitted, and, for a bounded number of
    requests per pass, after another one with the same first page was computed.

    Args:
        policy: see above.
        max_overtake: seconds; for `balanced`.
        page_size: tokens in a page.
        match: how many tokens of a request the tree has now.
    """

    def __init__(
        self, policy: SchedulePolicy, max_overtake: float, page_size: int, match: Callable[[Request], int]
    ) -> None:
        self._rank: Callable[[Request], Any] = getattr(self, f"_rank_{policy}")
        self._by_match = policy in ("lpm", "balanced")
        self._max_overtake = max_overtake
        self._page_size = page_size
        self._match = match
        self._order: SortedKeyList = SortedKeyList(key=lambda request: request.rank)
        self._families: dict[_Family, OrderedDict[Request, None]] = {}
        self._stale: dict[_Family, int] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._order)

    def first(self, count: int) -> list[Request]:
        """The next to be admitted."""
        return list(self._order.islice(0, count))

    def add(self, request: Request) -> None:
        """Let a request wait."""
        if self._by_match:
            request.matched_tokens = self._match(request)
            self._families.setdefault(self._family(request), OrderedDict())[request] = None
        request.rank = self._rank(request)
        self._order.add(request)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises ValueError if it does not wait."""
        self._order.remove(request)
        if self._by_match:
            family = self._family(request)
            del self._families[family][request]
            if not self._families[family]:
                del self._families[family]
                self._stale.pop(family, None)

    def rank_again(self, request: Request, matched_tokens: int) -> bool:
        """Book what the tree has of a waiting request now; whether that puts it further back."""
        if not self._by_match or matched_tokens == request.matched_tokens:
            return False
        self._order.remove(request)
        before, request.matched_tokens = request.rank, matched_tokens
        request.rank = self._rank(request)
        self._order.add(request)
        return request.rank > before

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

    @staticmethod
    def _rank_fcfs(request: Request) -> Any:
        return request.sequence

    @staticmethod
    def _rank_priority(request: Request) -> Any:
        return -request.priority, request.sequence

    @staticmethod
    def _rank_lpm(request: Request) -> Any:
        return -request.priority, -request.matched_tokens, request.sequence

    @staticmethod
    def _rank_dfs(request: Request) -> Any:
        return -request.priority, request.namespace, request.key(len(request.tokens)), request.sequence

    def _rank_balanced(self, request: Request) -> Any:
        dear = min((len(request.tokens) - request.matched_tokens) / _DEAR_TOKENS, 1.0)
        return -request.priority, request.arrival_s + dear * self._max_overtake, request.sequence
