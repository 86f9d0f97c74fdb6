"""Random lives of requests on the prefix strategy, without a model."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.config import make_config
from runtime.kv.cache import PagedCache
from runtime.kv.pool import KVPool
from runtime.request import Request, Work
from runtime.reuse.prefix import PrefixStrategy
from tests.runtime.requests import make_request

PAGE, PAGES = 2, 10


class Uses(RuleBasedStateMachine):
    """Requests that wait, are admitted, compute, and end or give way.

    The model: for each cached page, how many admissions have read it. To look a request up, again and again while there
    is no room for it, is no use, and neither is its own commit or release.
    """

    def __init__(self):
        super().__init__()
        pool = KVPool(1, PAGES, PAGE, 1, 1, torch.float32, torch.device("cpu"))
        self.cache = PagedCache(pool, make_config().cache)
        self.strategy = PrefixStrategy(self.cache, 1)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.uses: dict[int, int] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def come(self, tokens):
        new = make_request(tokens, strategy=self.strategy)
        self.waiting.append(new)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 9))
    def look_up(self, which):
        """As often as the scheduler likes."""
        request = self.waiting[which % len(self.waiting)]
        found = request.lease.look()
        if request.lease.admit(found, headroom=len(self.running)):
            self.waiting.remove(request)
            self.running.append(request)
            for page in found.match.pages:
                self.uses[page] += 1

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), count=st.integers(1, 5))
    def compute(self, which, count):
        request = self.running[which % len(self.running)]
        count = min(count, request.num_remaining)
        request.lease.book(Work(request, request.sequence.num_computed, count, count), [], 1.0)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), again=st.booleans())
    def end(self, which, again):
        request = self.running.pop(which % len(self.running))
        request.lease.release(keep=True)
        if again:
            self.waiting.append(request)

    @invariant()
    def agrees(self):
        self.cache.check(self.running)
        hits = {page: node.hits for node in self.cache.tree.nodes() for page in node.pages}
        self.uses = {page: self.uses.get(page, 0) for page in hits}  # new pages begin at 0
        assert hits == self.uses


TestUses = Uses.TestCase
TestUses.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
