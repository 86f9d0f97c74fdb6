"""Waiting requests, in the order of admission."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, KeysView
from itertools import islice

from sortedcontainers import SortedKeyList

from radix import Namespace
from runtime.config import SchedulePolicy
from runtime.request import Found, Request

# Most waiting requests to match again in one pass, after new KV that they may share was computed.
_REFRESHED = 16

# Most credit for overtaking: in full steps, and in seats among the running requests.
_MOST_STEPS, _MOST_SEATS = 4, 4.0

# Weight of the latest ended request in the moving average of output lengths.
_LATEST = 0.05

_Family = tuple[Namespace, bytes]
_Rank = Callable[[Request], int | tuple[int, ...]]


class _Line:
    """The waiting requests of one account, by arrival and by match."""

    def __init__(self, by_arrival: _Rank, by_match: _Rank | None):
        self.order: SortedKeyList = SortedKeyList(key=by_arrival)
        self.matches: SortedKeyList | None = None if by_match is None else SortedKeyList(key=by_match)


class WaitingQueue:
    """A queue in the order of a policy. Every operation takes O(log n) for n waiting requests.

    - `fcfs`: by arrival.
    - `priority`: by priority, then arrival. The policies below respect priorities as well.
    - `lpm`: longest match first.
    - `balanced`: by arrival, but a share of the work goes to the longest match. A request's cost is its uncached rows
      plus the mean output of recent requests. Serving a request in order adds a part of its cost to a budget;
      overtaking spends its cost. So nearly cached requests are admitted before their pages are evicted,
      and no request waits longer than 1 / (1 - share) times its wait by arrival plus 4 full steps. While only one seat
      among the running requests is free, seats are earned and spent in the same way. A prompt that fills whole steps
      may wait longer, as it leaves half of each step to shorter prompts.

    Each account has a line of its own, with this order. The next request is of the account that runs fewest requests,
    among those whose first request has the highest priority.

    The queue looks up a request's cached tokens on arrival, before admission, and after another request with the same
    first page was computed. Each pass repeats this last look-up for a bounded number of requests.

    Args:
        policy: see above.
        overtake_share: for `balanced`, between 0 and 1.
        step_tokens: rows of a full step, the unit of saved credit.
        page_size: tokens in a page.

    Attributes:
        matched: cached tokens of each waiting request at its last look-up; only `lpm` and `balanced` look up.
    """

    def __init__(self, policy: SchedulePolicy, overtake_share: float, step_tokens: int, page_size: int) -> None:
        # Each request's family on arrival; its namespace may change while it waits.
        self._placed: dict[Request, _Family] = {}
        self.matched: dict[Request, int] = {}
        self._rank = _by_arrival if policy == "fcfs" else _by_priority
        self._order: SortedKeyList = SortedKeyList(key=self._rank)
        self._lines: dict[str, _Line] = {}
        self._matching, self._lpm = policy in ("lpm", "balanced"), policy == "lpm"
        self._earned = overtake_share / (1 - overtake_share)
        self._most_tokens = float(_MOST_STEPS * step_tokens)
        self._tokens, self._seats = self._most_tokens, _MOST_SEATS
        self._generated = 0.0
        self._page_size = page_size
        self._families: dict[_Family, OrderedDict[Request, None]] = {}
        self._stale: dict[_Family, int] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._order)

    @property
    def accounts(self) -> KeysView[str]:
        """The accounts whose requests wait."""
        return self._lines.keys()

    def candidates(
        self, scarce: Callable[[], bool], running: Callable[[], Counter[str]] = Counter[str]
    ) -> Iterator[Request]:
        """The requests in the order of admission.

        Args:
            scarce: whether one more request may run, and no second one.
            running: the number of running requests by account.
        """
        passed: set[Request] = set()
        while (request := self._next(passed, scarce, running)) is not None:
            passed.add(request)
            yield request

    def _next(
        self, passed: set[Request], scarce: Callable[[], bool], running: Callable[[], Counter[str]]
    ) -> Request | None:
        lines = [*self._lines.items()]
        if len(lines) > 1:
            firsts = ((_first(line.order, passed), account) for account, line in lines)
            seats = running()
            ranks = [
                (0 if self._rank is _by_arrival else -first.message.priority, seats[account], first.serial, account)
                for first, account in firsts
                if first is not None
            ]
            lines = [(account, self._lines[account]) for *_, account in sorted(ranks)[:1]]
        return self._next_of(lines[0][1], passed, scarce) if lines else None

    def _next_of(self, line: _Line, passed: set[Request], scarce: Callable[[], bool]) -> Request | None:
        if line.matches is None:
            return _first(line.order, passed)
        best = _first(line.matches, passed)
        if best is None or self._lpm or (self._cost(best) <= self._tokens and (self._seats >= 1 or not scarce())):
            return best
        return _first(line.order, passed)

    def add(self, request: Request) -> None:
        family = self._family(request)
        self._placed[request] = family
        self._order.add(request)
        if (account := request.message.account) not in self._lines:
            self._lines[account] = _Line(self._rank, self._match_rank if self._matching else None)
        line = self._lines[account]
        line.order.add(request)
        if line.matches is not None:
            try:
                self.matched[request] = request.lease.look().tokens
            except Exception:
                self.matched[request] = 0  # the look-up before admission fails, too, and ends this request alone
            line.matches.add(request)
            self._families.setdefault(family, OrderedDict())[request] = None

    def remove(self, request: Request) -> None:
        """Remove a request. Raises ValueError if it does not wait."""
        if request not in self._placed:
            raise ValueError(f"{request.rid} does not wait")
        self._order.remove(request)
        family, line = self._placed.pop(request), self._lines[request.message.account]
        line.order.remove(request)
        if not line.order:
            del self._lines[request.message.account]
        if line.matches is not None:
            line.matches.remove(request)
            del self.matched[request]
            del self._families[family][request]
            if not self._families[family]:
                del self._families[family]
                self._stale.pop(family, None)

    def admit(self, request: Request, scarce: bool) -> None:
        """Remove an admitted request, and count the credit that it earns or spends for `balanced`."""
        in_order, cost = request is self._lines[request.message.account].order[0], self._cost(request)
        self._tokens = min(self._tokens + (self._earned * cost if in_order else -cost), self._most_tokens)
        if scarce:
            self._seats = min(self._seats + (self._earned if in_order else -1), _MOST_SEATS)
        self.remove(request)

    def rank_again(self, request: Request, matched_tokens: int) -> bool:
        """Set the cached tokens of a waiting request; returns whether others must now be considered before it."""
        line = self._lines[request.message.account]
        if line.matches is None or matched_tokens == self.matched[request]:
            return False
        line.matches.remove(request)
        is_later, self.matched[request] = matched_tokens < self.matched[request], matched_tokens
        line.matches.add(request)
        return is_later and (self._lpm or request is not line.order[0])

    def ended(self, request: Request) -> None:
        """Add an ended request's number of output tokens to the moving average."""
        self._generated += _LATEST * (request.num_output - self._generated)

    def computed(self, request: Request) -> None:
        """Note that the tree has new KV of a running request, which requests with the same first page may match."""
        family = self._family(request)
        if family in self._families:
            self._stale[family] = len(self._families[family])

    def refresh(self, find: Callable[[Request], Found]) -> None:
        """Look up some of the requests noted by `computed`; later passes look up the others."""
        budget = _REFRESHED
        for family, count in list(self._stale.items()):
            members = self._families[family]
            for request in list(islice(members, min(count, budget))):
                members.move_to_end(request)
                self.rank_again(request, find(request).tokens)
            if count > budget:
                self._stale[family] = count - budget
                return
            budget -= count
            del self._stale[family]

    def _family(self, request: Request) -> _Family:
        return request.namespace, request.key(self._page_size)

    def num_uncached(self, request: Request) -> int:
        """Number of prompt rows that a waiting request would have to compute."""
        return request.num_remaining - self.matched.get(request, 0)

    def _cost(self, request: Request) -> float:
        matched = self.matched.get(request, 0)
        return len(request.tokens) + len(request.entry_tokens) - matched + self._generated

    def _match_rank(self, request: Request) -> tuple[int, int, int]:
        return -request.message.priority, -self.matched[request], request.serial


def _first(order: SortedKeyList, passed: set[Request]) -> Request | None:
    return next((request for request in order if request not in passed), None)


def _by_arrival(request: Request) -> int:
    return request.serial


def _by_priority(request: Request) -> tuple[int, int]:
    return -request.message.priority, request.serial
