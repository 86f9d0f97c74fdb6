"""Which requests take part in the next step, within the token and page budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from radix import Match
from runtime.config import SchedulerConfig
from runtime.engine.queue import Waiting
from runtime.kv.cache import PagedCache
from runtime.request import Request


@dataclass(slots=True)
class Work:
    """The next `count` tokens of a request, to be computed in this step.

    `logits` says which rows of the step's logits are this request's: the last one gives the next token if the work
    `samples`; further ones are there for prompt log-probabilities. `ahead` is 1 where the one token to be computed is
    that of a step before, which has not been read yet.
    """

    request: Request
    count: int
    ahead: int = 0
    logits: slice = field(default_factory=lambda: slice(0, 0))

    @property
    def samples(self) -> bool:
        """Whether the last of these rows gives a new token."""
        return self.count == self.request.num_remaining

    def shrink(self) -> bool:
        """Leave half of the rows for later steps; False if there is only one."""
        if self.count == 1:
            return False
        self.count //= 2
        return True


class Scheduler:
    """Continuous batching: decode rows first, then chunked prefill of what runs, then admission of what waits.

    Waiting requests are served in the order of the policy (see `Waiting`). When memory runs out, the request that is
    cheapest to compute again is retracted: it gives up its pages (the tree keeps what it can), keeps its tokens and
    waits again. The one admitted first is spared, so it always goes on, and as every accepted request fits into the
    pool alone, all of them end.
    """

    def __init__(self, config: SchedulerConfig, cache: PagedCache, step_tokens: int = 2048):
        """`step_tokens`: rows of a step where the configuration leaves them open."""
        self.config = config
        self.step_tokens = config.step_tokens or step_tokens
        self._chunk_tokens = config.chunk_tokens or self.step_tokens
        self.cache = cache
        self.waiting = Waiting(
            config.schedule_policy,
            config.overtake_share,
            self.step_tokens,
            cache.page_size,
            lambda request: self._match(request)[1],
        )
        self.running: list[Request] = []
        self.num_retracted = 0
        # What there was when it did not suffice to admit anybody; None: somebody has come or gone since.
        self._too_few: int | None = None

    def add(self, request: Request) -> None:
        """Let a request wait."""
        self._too_few = None
        self.waiting.add(request)

    def remove(self, request: Request, keep: bool = True) -> None:
        """Take a request out, wherever it is, and take its pages back."""
        self._too_few = None
        if request in self.running:
            self.running.remove(request)
            self.waiting.ended(request)
            self.cache.release(request, keep)
        else:
            self.waiting.remove(request)

    def computed(self, request: Request) -> None:
        """More of a running request has come into the tree."""
        self.waiting.computed(request)

    def schedule(self) -> list[Work]:
        """The work of the next step; empty only if nothing can run."""
        work = self._decode()
        budget = self.step_tokens - len(work)
        budget = self._prefill(work, budget)
        self._admit(work, budget)
        if not work and self.waiting and self.cache.pins.yield_one():
            return self.schedule()  # only pins stood in the way of a live request
        return work

    def follow(self, work: Sequence[Work]) -> list[Work]:
        """The decode step after one whose tokens are not known yet; empty: those have to be read first.

        It is the step that `schedule` would make if none of them ends a request. So there is none unless all that runs
        decodes, nobody who waits could be admitted, no request needs the host between its tokens, and there is memory
        without retraction. A request that reaches its limit with the unread token is left out.
        """
        if not self._all_decode(work) or not self._none_to_admit():
            return []
        going_on = [item.request for item in work if len(item.request.tokens) + 1 < item.request.max_tokens]
        if len(going_on) < len(work) and self.waiting:
            return []
        if not all(self.cache.grow(request, ahead=1) for request in going_on):
            return []
        return [Work(request, 1, ahead=1) for request in going_on]

    def _all_decode(self, work: Sequence[Work]) -> bool:
        if {item.request for item in work} != set(self.running):
            return False
        return all(
            item.request.num_remaining == 1
            and not item.request.sampling.constrained
            and not item.request.wants_prompt_logprobs
            for item in work
        )

    def _none_to_admit(self) -> bool:
        if not self.waiting or len(self.running) >= self.config.max_running:
            return True
        return self._too_few is not None and self.cache.num_available <= self._too_few

    def _decode(self) -> list[Work]:
        work: list[Work] = []
        for request in list(self.running):
            if len(work) == self.step_tokens:
                break
            if request.num_remaining != 1 or request not in self.running:
                continue
            while not self.cache.grow(request):
                victim = self._cheapest()
                self._retract(victim)
                work = [item for item in work if item.request is not victim]
                if victim is request:
                    break
            else:
                work.append(Work(request, 1))
        return work

    def _cheapest(self) -> Request:
        """Who should give way: of low priority, with few tokens that only it uses. The first only if it is alone."""
        candidates = self.running[:0:-1] or self.running
        return min(candidates, key=lambda request: (request.priority, self.cache.num_own_tokens(request)))

    def _retract(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.release(request)
        self.add(request)
        self.num_retracted += 1

    def _prefill(self, work: list[Work], budget: int) -> int:
        for request in self.running:
            if request.num_remaining > 1 and budget > 0:
                budget -= self._take(work, request, budget)
        return budget

    def _take(self, work: list[Work], request: Request, budget: int) -> int:
        count = min(request.num_remaining, self._chunk_tokens, budget)
        work.append(Work(request, count))
        return count

    def _admit(self, work: list[Work], budget: int) -> None:
        # Prompts that will be in the tree soon: whoever shares more with one of them than the tree has now waits
        # for it instead of computing the same pages twice.
        computing = [r for r in self.running if r.num_remaining > 1]
        self.waiting.refresh()
        for request in islice(self.waiting.candidates(self._scarce), 2 * self.config.max_running):
            if budget <= 0 or len(self.running) >= self.config.max_running:
                return
            match, matched_tokens = self._match(request)
            if self.waiting.rank_again(request, matched_tokens):
                continue
            if self.cache.enabled and any(self._shares_more(request, other, len(match.pages)) for other in computing):
                continue
            if not self.cache.admit(request, match, headroom=len(self.running)):
                self._too_few = self.cache.num_available
                return
            self.waiting.admit(request, self._scarce())
            self.running.append(request)
            if request.cached_tokens < 0:
                request.cached_tokens = request.num_computed
            if request.num_remaining > 1:
                computing.append(request)
            budget -= self._take(work, request, budget)

    def _scarce(self) -> bool:
        """Whether one more request takes the last place among those that run."""
        return len(self.running) + 1 >= self.config.max_running

    def _match(self, request: Request) -> tuple[Match, int]:
        """What the tree has of a request, and how many tokens that is."""
        match = self.cache.match(request)
        return match, len(match.pages) * self.cache.page_size + match.partial_rows

    def _shares_more(self, request: Request, other: Request, matched_pages: int) -> bool:
        if request.namespace != other.namespace or request.wants_prompt_logprobs:
            return False
        page_size = self.cache.page_size
        start, stop = matched_pages * page_size, (matched_pages + 1) * page_size
        if stop > min(len(request.tokens) - 1, len(other.tokens)):
            return False
        # The one page first: most pairs differ there, and the whole prefix is compared for the others only.
        return request.tokens[start:stop] == other.tokens[start:stop] and request.key(stop) == other.key(stop)
