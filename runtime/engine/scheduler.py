"""The scheduler chooses the requests and rows of the next step, within its budget of rows and pages."""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count, islice

from runtime.config import SchedulerConfig
from runtime.engine.queue import WaitingQueue
from runtime.kv.cache import PagedCache
from runtime.request import Found, Request, Status, Work

log = logging.getLogger("ramet.engine")

# Share of the work for which the policy `balanced` prefers the longest match to arrival.
OVERTAKE_SHARE = 0.1
# Share of a step's rows that decode rows leave to prompts.
PROMPT_SHARE = 0.25


class Scheduler:
    """Continuous batching: decode rows first, then chunked prefill of running requests, then admission.

    While prompts are there to compute, decode rows leave them PROMPT_SHARE of a step. Requests for whose next token
    no row is left take turns.

    Accounts share the seats among the running requests, and the memory. If none is left, the account with most running
    requests loses its latest one to a waiting account with at least two fewer.

    The policy orders waiting requests (see `WaitingQueue`). When memory runs out, the scheduler retracts the request
    that is cheapest to compute again: the request releases its pages (the tree keeps the full ones), keeps its tokens
    and waits again. The oldest running request is retracted last. Every accepted request fits into the
    pool alone, so all of them end.

    A prompt that fills a step leaves half of it to shorter prompts of the same or a higher priority, the shortest
    first, so that a short prompt does not wait for a whole long one. These prompts run already, or are admitted while
    seats and memory suffice. The prompt admitted first has the other half, so no prompt takes more than twice as long.

    Requests whose rows cannot be cut into chunks take turns. Each step serves as many as fit into the budget, and at
    least one: the request that has waited longest comes first.

    Before a request waits for admission, it is blocked while its grammar is compiled or its KV is loaded.

    Attributes:
        blocked_on: functions that return the event that blocks a new request, or None.
        at: the request for which a strategy works now, while `schedule` runs. If it fails, this request does.
        blocked: by event, the blocked requests, each with the progress at which it wakes. An event is a request id (for
            its grammar), a running request (for tokens to share) or a load from tiers.
    """

    def __init__(self, config: SchedulerConfig, cache: PagedCache, step_tokens: int, max_running: int = 64):
        """`step_tokens`, `max_running`: rows of a step, and most running requests, if `config` does not set them."""
        self.config = config
        self.max_running = config.max_running or max_running
        self.blocked_on: Sequence[Callable[[Request], Hashable | None]] = ()
        self.step_tokens = config.step_tokens or step_tokens
        self._chunk_tokens = config.chunk_tokens or self.step_tokens
        self.cache = cache
        self.waiting = WaitingQueue(config.schedule_policy, OVERTAKE_SHARE, self.step_tokens, cache.page_size)
        self.blocked: dict[Hashable, dict[Request, int]] = {}
        self.running: list[Request] = []
        self.at: Request | None = None
        self._faults: dict[Request, Exception] = {}  # raised for new requests; `schedule` raises them again
        self.num_retracted = 0
        self._turns = count(1)
        self._decoded = 0  # decode rows of all steps that left some out
        self._last_turns: dict[Request, int] = {}  # of unchunkable requests
        # Available pages when admission last failed for memory; None: a request has been added or removed since.
        self._too_few: int | None = None

    def add(self, request: Request) -> None:
        """Queue a request, or block it until an event."""
        self._too_few = None
        try:
            events = (blocked_on(request) for blocked_on in self.blocked_on)
            event = next((event for event in events if event is not None), None)
        except Exception as error:
            self._faults[request], event = error, None
        if event is not None:
            self._block(request, event)
            return
        request.status = Status.WAITING
        self.waiting.add(request)

    def remove(self, request: Request, keep: bool = True) -> None:
        """Remove a request in any state and release its pages; with `keep`, computed rows stay cached."""
        self._too_few = self.at = None
        self._last_turns.pop(request, None)
        self._faults.pop(request, None)
        if request.status is Status.RUNNING:
            self.running.remove(request)
            if request.wants_tokens:
                self.waiting.ended(request)
            self._release(request, keep)
            self.wake(request)
        elif request.status is Status.BLOCKED:
            self._unblock(next(event for event, waits in self.blocked.items() if request in waits), request)
        else:
            self.waiting.remove(request)
        request.status = Status.ENDED

    def _release(self, request: Request, keep: bool) -> None:
        """Release all pages of a request that ends, also if its strategy fails; then none of its rows stay cached."""
        try:
            request.lease.release(keep)
        except Exception:
            log.exception("the strategy of request %s could not release its pages", request.rid)
            self.cache.release(request)

    @property
    def num_blocked(self) -> int:
        return sum(map(len, self.blocked.values()))

    def _block(self, request: Request, event: Hashable, at: int = 0) -> None:
        """Block a request until `wake` is called for an event with `at` or more."""
        request.status = Status.BLOCKED
        self.blocked.setdefault(event, {})[request] = at

    def _unblock(self, event: Hashable, request: Request) -> None:
        del self.blocked[event][request]
        if not self.blocked[event]:
            del self.blocked[event]

    def wake(self, event: Hashable, reached: int | None = None) -> list[Request]:
        """Queue the requests that an event wakes; `reached`: its progress, None: complete."""
        ready = [r for r, at in self.blocked.get(event, {}).items() if reached is None or at <= reached]
        for request in ready:
            self._unblock(event, request)
        for request in ready:
            self.add(request)
        return ready

    def computed(self, request: Request) -> None:
        """Note that the tree has new KV of a running request."""
        self.wake(request, request.sequence.num_computed)
        self.waiting.computed(request)

    def schedule(self) -> list[Work]:
        """The work of the next step; empty only if nothing can run."""
        self.at = None
        if self._faults:
            self.at, fault = next(iter(self._faults.items()))
            raise fault
        self._share_seats()
        while True:
            work = self._decode()
            budget = self.step_tokens - len(work)
            if len(work) < len(self.running):
                budget = self._prefill(work, budget)
            has_room = self._admit(work, budget)
            if len(work) < len(self.running):
                self._take_turns(work)
            # If nothing runs and no pages are held for loads, only pins can keep a live request waiting: remove one.
            if work or has_room or self.cache.held or not self.cache.pins.yield_one():
                return work

    def follow(self, work: Sequence[Work]) -> list[Work]:
        """The decode step after one whose tokens are unread; empty if these must be read first.

        It is the step that `schedule` would return if no unread token ended its request. It requires that all running
        requests get a token, no request can be admitted, no logits are read after the tokens, and memory suffices
        without retraction. It leaves out a request that reaches its limit with the unread token.
        """
        if not self._all_go_on(work) or not self._none_to_admit():
            return []
        going_on = [item for item in work if len(item.request.tokens) + 1 < item.request.max_length]
        if len(going_on) < len(work) and self.waiting:
            return []
        if not all(item.request.lease.grow(ahead=item.count) for item in going_on):
            return []
        return [Work(item.request, item.start + item.count, 1, 1, ahead=1) for item in going_on]

    def _all_go_on(self, work: Sequence[Work]) -> bool:
        """Whether the step has the last row of each running request, and nobody waits for KV that it computes."""
        requests = {item.request for item in work}
        return requests == set(self.running) and requests.isdisjoint(self.blocked) and all(map(_goes_on, work))

    def _none_to_admit(self) -> bool:
        if not self.waiting:
            return True
        self.cache.pins.expire()
        return self._is_full() and next(self._owed(), None) is None

    def _is_full(self) -> bool:
        """Whether seats or memory were too few for one more request."""
        if len(self.running) >= self.max_running:
            return True
        return self._too_few is not None and self.cache.num_available <= self._too_few

    def _share_seats(self) -> None:
        """Retract requests in favour of accounts that run fewer, if no more can be admitted."""
        if self._is_full():
            for victim in self._owed():
                self._retract(victim)

    def _owed(self) -> Iterator[Request]:
        """The running requests whose seats are owed to waiting ones, while their user retracts them."""
        if not self.waiting:
            return
        seats = self._seats()
        if len(seats.keys() | self.waiting.accounts) < 2:
            return
        for request in self.waiting.candidates(self._scarce, lambda: seats):
            account, priority = request.message.account, request.message.priority
            most, held = seats.most_common(1)[0]
            mine = (one for one in self.running if one.message.account == most and one.message.priority <= priority)
            victim = max(mine, key=lambda one: one.serial, default=None)
            if held - seats[account] < 2 or victim is None:
                return
            seats[most], seats[account] = held - 1, seats[account] + 1
            yield victim

    def _seats(self) -> Counter[str]:
        return Counter(request.message.account for request in self.running)

    def _decode(self) -> list[Work]:
        work: list[Work] = []
        for request in self._in_turn([request for request in self.running if _decodes(request)]):
            self.at = request
            if request.status is Status.RUNNING and self._grow(request, work):
                work.append(request.lease.work(1))
        return work

    def _in_turn(self, decoding: list[Request]) -> list[Request]:
        """The requests that decode now: all, or in turn as many as leave rows to prompts."""
        most = max(int(self.step_tokens * (1 - PROMPT_SHARE)), 1)
        if len(decoding) <= most or not self._has_prompts():
            return decoding
        start, self._decoded = self._decoded % len(decoding), self._decoded + most
        return [*decoding[start:], *decoding[:start]][:most]

    def _has_prompts(self) -> bool:
        return (bool(self.waiting) and not self._is_full()) or any(map(_prefills, self.running))

    def _grow(self, request: Request, work: list[Work]) -> bool:
        """Make room for a request's next rows. If needed, retract requests, this one included, and drop their work."""
        while not request.lease.grow():
            victim = self._cheapest()
            self._retract(victim)
            work[:] = [item for item in work if item.request is not victim]
            if victim is request:
                return False
        return True

    def _cheapest(self) -> Request:
        """The request to retract: lowest priority, then fewest own tokens. The first admitted only if it runs alone."""
        candidates = self.running[:0:-1] or self.running
        return min(candidates, key=lambda request: (request.message.priority, self.cache.num_own_tokens(request)))

    def _retract(self, request: Request) -> None:
        at, self.at = self.at, request
        request.lease.release(keep=True)
        self.at = at
        self.running.remove(request)
        self.wake(request)
        self.add(request)
        self.num_retracted += 1

    def _prefill(self, work: list[Work], budget: int) -> int:
        prompts = [request for request in self.running if _prefills(request)]
        if prompts and prompts[0].num_remaining > budget > 1:
            budget -= self._prefill_shorter(work, prompts, budget // 2)
        served = {item.request for item in work}
        for request in prompts:
            if budget > 0 and request not in served:
                budget -= self._take(work, request, budget)
        return budget

    def _prefill_shorter(self, work: list[Work], prompts: Sequence[Request], most: int) -> int:
        """Take at most `most` rows of prompts shorter than the first one, new requests included; returns the number."""
        first, budget, priority = prompts[0], most, prompts[0].message.priority
        if self._too_few is None:
            others = len(work)
            self._admit(work, budget, beside=min(prompts, key=lambda request: request.num_remaining))
            budget -= sum(item.num_rows for item in work[others:])
        for request in sorted(prompts[1:], key=lambda request: request.num_remaining):
            is_shorter = request.num_remaining < first.num_remaining and request.message.priority >= priority
            if budget > 0 and is_shorter:
                budget -= self._take(work, request, budget)
        return most - budget

    def _take(self, work: list[Work], request: Request, budget: int) -> int:
        self.at, limit = request, min(self._chunk_tokens, budget)
        if request.wants_prompt_logprobs:  # a row with its logits costs about two others
            limit = min(limit, max(self._chunk_tokens // 2, 1))
        item = request.lease.work(limit)
        work.append(item)
        return item.num_rows

    def _admit(self, work: list[Work], budget: int, beside: Request | None = None) -> bool:
        """Admit waiting requests while the budget lasts; False if memory does not suffice for the next one.

        `beside`: admit only requests with fewer rows than this one has left, and leave the last place free.
        """
        if not self.waiting:
            return True
        self.cache.pins.expire()
        computing = [request for request in self.running if request.strategy.unchunkable or _prefills(request)]
        self.waiting.refresh(self._look)
        for request in islice(self.waiting.candidates(self._scarce, self._seats), 2 * self.max_running):
            in_turns = request.strategy.unchunkable
            if (budget <= 0 and not in_turns) or len(self.running) >= self.max_running:
                break
            if beside is not None and (request.message.priority < beside.message.priority or self._scarce()):
                break
            if beside is not None and (in_turns or self.waiting.num_uncached(request) >= beside.num_remaining):
                continue
            self.at = request
            request.lease.prepare()
            found = self._look(request)
            if self.waiting.rank_again(request, found.tokens):
                continue
            alike = [other.lease for other in computing if other.strategy is request.strategy and other.message.store]
            if (peer := request.lease.peer(found, alike)) is not None:
                other, place = peer
                other.lease.expect(place)
                self.waiting.remove(request)
                self._block(request, other, place)
                continue
            if request.given is not None and not request.given.is_ready(found.tokens):  # KV was evicted meanwhile
                self.waiting.remove(request)
                self.add(request)
                continue
            if not self._admit_one(request, found):
                self._too_few = self.cache.num_available
                return False
            self.waiting.admit(request, self._scarce())
            request.status = Status.RUNNING
            self.running.append(request)
            if in_turns or request.num_remaining > 1:
                computing.append(request)
            if not in_turns:
                budget -= self._take(work, request, budget)
        return True

    def _admit_one(self, request: Request, found: Found) -> bool:
        try:
            return request.lease.admit(found, headroom=len(self.running))
        except Exception:
            self._release(request, keep=False)
            raise

    def _look(self, request: Request) -> Found:
        self.at = request
        return request.lease.look()

    def _scarce(self) -> bool:
        """Whether the next admission takes the last place."""
        return len(self.running) + 1 >= self.max_running

    def _take_turns(self, work: list[Work]) -> None:
        waiting = [request for request in self.running if request.strategy.unchunkable]
        budget, turn = self.step_tokens - sum(item.num_rows for item in work), next(self._turns)
        for request in sorted(waiting, key=lambda request: self._last_turns.get(request, 0)):
            self.at = request
            if request.status is not Status.RUNNING or not self._grow(request, work):
                continue
            item = request.lease.work(budget)
            if work and item.num_rows > budget:
                continue
            budget -= item.num_rows
            self._last_turns[request] = turn
            work.append(item)


def _decodes(request: Request) -> bool:
    return request.num_remaining == 1 and not request.strategy.unchunkable


def _goes_on(work: Work) -> bool:
    """Whether a request's next row is known before the work is booked: that of the token that the work gives."""
    request, strategy = work.request, work.request.strategy
    is_last = work.count == request.num_remaining and not strategy.unchunkable
    return is_last and (request.lease.steady or not work.prefills) and not request.wants_prompt_logprobs


def _prefills(request: Request) -> bool:
    return request.num_remaining > 1 and not request.strategy.unchunkable
