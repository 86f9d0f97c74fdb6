"""Which diffusion requests take part in the next step, and which prefix each of them shares."""

from __future__ import annotations

from itertools import count, islice

from runtime.config import SchedulerConfig
from runtime.engine.denoise_request import DenoiseRequest, DenoiseWork
from runtime.engine.queue import Waiting
from runtime.request import Request
from runtime.reuse.bicache.boundary_states import BoundaryStore
from runtime.reuse.bicache.depth_table import DepthTable
from runtime.reuse.bicache.encodings import Encodings, Part


class DenoiseScheduler:
    """Continuous batching of denoising steps: requests of any length and setting join and leave between steps.

    A request gets all its pages when it is admitted, so nobody has to give way later. Each step takes the running
    requests that have waited longest for their turn, while their rows fit into the budget, and one at least: rows that
    see each other cannot be cut into chunks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        encodings: Encodings,
        table: DepthTable,
        boundaries: BoundaryStore,
        num_layers: int,
        step_tokens: int = 2048,
    ):
        """`step_tokens`: rows of a step where the configuration leaves them open."""
        self.config = config
        self.step_tokens = config.step_tokens or step_tokens
        self.encodings, self.cache = encodings, encodings.cache
        self.table, self.boundaries, self.num_layers = table, boundaries, num_layers
        self.waiting = Waiting(
            config.schedule_policy, config.overtake_share, self.step_tokens, self.cache.page_size, self._matched
        )
        self.running: list[DenoiseRequest] = []
        self.num_retracted = 0
        self._turns = count(1)

    def add(self, request: DenoiseRequest) -> None:
        """Let a request wait."""
        self.waiting.add(request)

    def remove(self, request: DenoiseRequest, keep: bool = True) -> None:
        """Take a request out, wherever it is, and take its pages back."""
        if request in self.running:
            self.running.remove(request)
            self.cache.release(request, keep)
        else:
            self.waiting.remove(request)

    def schedule(self) -> list[DenoiseWork]:
        """The work of the next step; empty only if nothing can run."""
        self._admit()
        if not self.running and self.waiting and self.cache.pins.yield_one():
            return self.schedule()  # only pins stood in the way of a live request
        budget, turn = self.step_tokens, next(self._turns)
        work: list[DenoiseWork] = []
        for request in sorted(self.running, key=lambda request: request.turn):
            item = request.work(self.num_layers)
            if work and item.num_rows > budget:
                continue
            budget -= item.num_rows
            request.turn = turn
            work.append(item)
        return work

    def _admit(self) -> None:
        encoding = {request.encoding for request in self.running if request.is_encoding}
        self.waiting.refresh()
        for request in islice(self.waiting.candidates(self._scarce), 2 * self.config.max_running):
            assert isinstance(request, DenoiseRequest)
            if len(self.running) >= self.config.max_running:
                return
            if self.waiting.rank_again(request, self._matched(request)):
                continue
            if request.encoding in encoding:
                continue  # the prefix is in the tree in a moment
            if not self.encodings.admit(request):
                return
            if request.is_encoding:
                encoding.add(request.encoding)
            request.boundary = self.boundaries.get(request.encoding, request.prefix_len, request.depth)
            request.cached_tokens = request.num_tree_pages * self.cache.page_size
            self.waiting.admit(request, self._scarce())
            self.running.append(request)

    def _scarce(self) -> bool:
        """Whether one more request takes the last place among those that run."""
        return len(self.running) + 1 >= self.config.max_running

    def _share(self, request: DenoiseRequest) -> None:
        """Settle which prefix a request shares and in how many layers; neither without reuse, or where it cannot fit.

        Whole pages are shared. The row that the first mask is read from is never part of it: the head runs on what is
        computed at every step.
        """
        shared = self._prefix(request)
        shared = self._part(request, shared) or shared
        private = self.cache.pages_for(request.length) * request.num_canvases
        if self.cache.pages_for(shared.length) + private > self.cache.pool.num_pages:
            shared = Part(None, 0, 0)
        request.prefix_len, request.encoded_len = shared.length, shared.encoded
        request.depth = self._depth(request, shared)
        request.encoding = shared.encoding if request.depth else None

    def _depth(self, request: DenoiseRequest, shared: Part) -> int:
        if not shared.length:
            return 0
        depth = request.params.depth
        if depth is None:
            depth = self.table.partial_depth(shared.length / request.length, shared.length / shared.encoded)
        return min(depth, self.num_layers)

    def _prefix(self, request: DenoiseRequest) -> Part:
        """What is declared, encoded or not, or what is found to be encoded; as a whole."""
        length = self._prefix_length(request)
        encoding = Encodings.namespace(request.namespace, request.key(length)) if length else None
        return Part(encoding, length, length)

    def _prefix_length(self, request: DenoiseRequest) -> int:
        if not (request.params.reuse and self.cache.enabled):
            return 0
        limit = request.prompt_len - request.denoiser.spec.logits_shift
        declared = request.params.prefix_tokens
        if declared is None:
            return self.encodings.discover(request.tokens, request.namespace, limit)
        return min(declared, limit) // self.cache.page_size * self.cache.page_size

    def _part(self, request: DenoiseRequest, whole: Part) -> Part | None:
        """The beginning of another encoding, where that is wanted and goes further than what the tree has as a whole.

        None where the table was not measured for that.
        """
        params = request.params
        if not (params.reuse and params.partial and self.cache.enabled):
            return None
        limit = request.prompt_len - request.denoiser.spec.logits_shift
        has_whole = whole.encoding and self.encodings.match(request.key(whole.length), whole.encoding)
        if params.prefix_tokens is not None:
            if has_whole:
                return None
            limit = min(limit, params.prefix_tokens)
        part = self.encodings.part(request.tokens, request.namespace, limit)
        if part is None or (has_whole and part.length <= whole.length):
            return None
        return part if self._depth(request, part) else None

    def _matched(self, request: Request) -> int:
        """Tokens of a waiting request that the tree has."""
        assert isinstance(request, DenoiseRequest)
        self._share(request)
        if not request.encoding:
            return 0
        found = self.encodings.match(request.key(request.prefix_len), request.encoding)
        return request.prefix_len if found else 0
