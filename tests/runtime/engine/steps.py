"""A scheduler over a real cache and the strategy of causal models; instead of a model, every row gives token 9."""

from array import array
from itertools import count

import torch

from radix import Match, Namespace
from runtime.config import make_config
from runtime.engine.scheduler import Scheduler
from runtime.kv.cache import PagedCache
from runtime.kv.pool import KVPool
from runtime.request import Found, Request, Work
from runtime.reuse.prefix import PrefixLease, PrefixStrategy
from tests.runtime.requests import make_request


class WholeLease(PrefixLease):
    """All of a request's tokens in every step."""

    def look(self) -> Found:
        return Found(0, Match())

    def peer(self, found, computing):
        return None

    def admit(self, found: Found, headroom: int) -> bool:
        return True

    def work(self, limit: int) -> Work:
        self.strategy.limits.append(limit)
        return Work(self.request, 0, len(self.request.tokens), len(self.request.tokens))

    def book(self, work: Work, saved, seconds: float) -> bool:
        return True


class InTurns(PrefixStrategy):
    """Rows that see each other, as a canvas's."""

    name = "in turns"
    unchunkable = True

    def __init__(self, cache: PagedCache, num_layers: int):
        super().__init__(cache, num_layers)
        self.limits: list[int] = []  # rows that were left, for each share

    def open(self, request: Request, ask: None) -> WholeLease:
        return WholeLease(self, request)


class Engine:
    """Steps without a model."""

    def __init__(self, pages: int = 64, page_size: int = 1, step_tokens: int = 32, **options):
        options = {"schedule_policy": "priority"} | options
        config = make_config(page_size=page_size, **options)
        pool = KVPool(1, pages, page_size, 1, 1, torch.float32, torch.device("cpu"))
        self.cache = PagedCache(pool, config.cache, clock=lambda: 0.0)
        self.scheduler = Scheduler(config.scheduler, self.cache, step_tokens)
        self.causal, self.in_turns = PrefixStrategy(self.cache, 1), InTurns(self.cache, 1)
        self.requests: dict[str, Request] = {}
        self.serials = count()
        self.work: list[Work] = []

    def add(self, rid: str, tokens: list[int], new: int = 100, blocked_on: object = None, **fields) -> Request:
        given = {"strategy": self.causal, "serial": next(self.serials), "rid": rid, **fields}
        request = self.requests[rid] = make_request(tokens, new, **given)
        self.scheduler.blocked_on = [lambda _: blocked_on]
        self.scheduler.add(request)
        self.scheduler.blocked_on = []
        return request

    def step(self) -> dict[str, int]:
        """Run a step; the rows of each request."""
        self.work = self.scheduler.schedule()
        rows = {item.request.rid: item.num_rows for item in self.work}
        for item in self.work:
            request, prefills, samples = item.request, item.prefills, item.samples
            request.lease.book(item, (), float(item.num_rows))
            if prefills:
                self.scheduler.computed(request)
            if samples and not request.strategy.unchunkable:
                request.tokens.append(9)
                if len(request.tokens) == request.max_length:
                    self.scheduler.remove(request)
        self.cache.check(self.scheduler.running)
        return rows

    def steps(self, number: int) -> list[dict[str, int]]:
        return [self.step() for _ in range(number)]

    def remove(self, rid: str, keep: bool = True) -> None:
        self.scheduler.remove(self.requests[rid], keep)

    def cached(self, tokens: list[int], namespace: Namespace = Namespace()) -> int:
        return len(self.cache.tree.match(array("i", tokens).tobytes(), namespace).pages)

    @property
    def running(self) -> str:
        return "".join(request.rid for request in self.scheduler.running)

    @property
    def waiting(self) -> str:
        return "".join(request.rid for request in self.scheduler.waiting)

    @property
    def blocked(self) -> str:
        return "".join(request.rid for waits in self.scheduler.blocked.values() for request in waits)


def prompt(number: int, length: int) -> list[int]:
    return [100 * number + i for i in range(length)]
