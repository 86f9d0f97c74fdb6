"""EngineCore: requests in, token events out, one step at a time. No threads, no sockets."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radix.stats import Histogram
from runtime.config import Config, refuse_approximations
from runtime.diffusion.decoding import CanvasDecoding
from runtime.engine.adapters import Adapters
from runtime.engine.admin import Admin
from runtime.engine.in_flight import InFlight
from runtime.engine.keeping import keep_prompt
from runtime.engine.opening import open_request
from runtime.engine.pinning import Pinning
from runtime.engine.scheduler import Scheduler
from runtime.engine.tiering import LOAD_WAIT_S, Tiering, open_tiers
from runtime.errors import EngineDead, InvalidRequest, ModelError, RametError
from runtime.execution.device import choose_device, choose_overlap, is_lost, is_out_of_memory
from runtime.execution.parallel.driver import open_executor
from runtime.kv.cache import PagedCache
from runtime.kv.lookup import count_miss
from runtime.kv.publisher import EventPublisher
from runtime.models.adapters.lora import read_lora
from runtime.models.implementation import own_spec
from runtime.models.resolve import model_name
from runtime.models.tokenizer import Tokenizer
from runtime.protocol import (
    Abort,
    AddPin,
    AddRequest,
    Finish,
    Inbound,
    ModelInfo,
    Outbound,
    Reply,
    Shutdown,
    StepEvents,
    TokenEvent,
)
from runtime.request import Request, Work
from runtime.reuse.bicache.depth_table import read_table
from runtime.reuse.bicache.strategy import BiCache
from runtime.reuse.blocks import BlockPrefix, CanvasPrefix
from runtime.reuse.fusion.strategy import Fusion
from runtime.reuse.modules.strategy import Modules
from runtime.reuse.planner import Planner
from runtime.reuse.prefix import PrefixStrategy
from runtime.reuse.reasoning.strategy import ReasonCache
from runtime.reuse.strategy import Strategy
from runtime.sampling.batched import make_sampler
from runtime.sampling.decoding import Decoding, Found, NextToken
from runtime.sampling.drafts.drafter import Drafter
from runtime.sampling.grammar import GrammarCompiler
from runtime.sampling.sampler import BadLogits

log = logging.getLogger("ramet.engine")

_COUNTED = (
    *("requests", "aborted_requests", "failed_requests", "failed_steps", "bad_logits", "prompt_tokens"),
    *("queries", "hits", "queried_tokens", "cached_tokens", "generation_tokens", "prefill_tokens", "steps"),
    *("row_layers", "drafts", "drafted_tokens", "accepted_tokens"),
)

# Bounds of the histogram of a step's token rows.
_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# Wait of an idle engine that publishes events: consumers may ask for those that they missed.
_IDLE_WITH_EVENTS_S = 0.2


class EngineCore:
    """The engine without its surroundings.

    With `overlap`, steady decode runs one step ahead: before the tokens of a step are read, the next one is launched,
    with these tokens where the device has them, so that the host reads, books, schedules and plans while the device
    computes. The rows that such a step computed for requests that turn out to have ended are thrown away: they lie in
    pages that are private to these requests, behind all that may come into the tree, and whoever gets these pages next
    writes later.

    Attributes:
        strategies: by name; the first one serves requests that ask for none.
    """

    def __init__(self, config: Config, path: Path, quotas: Mapping[str, int] | None = None):
        """Load the model directory `path`; `quotas`: cached pages by tenant. Raises ModelError."""
        if config.cache.reasoning_cache and config.model.tensor_parallel > 1:
            raise ModelError("--reasoning-cache is not served by several ranks")
        if config.tiers.any and not config.cache.prefix_cache:
            raise ModelError("--no-prefix-cache leaves nothing for --host-memory, --disk-cache and --kv-store")
        self.config = config
        # Before the weights are read, so that what cannot be used is an error at once.
        _check_files(config, path)
        opened = open_tiers(config.tiers) if config.cache.prefix_cache else None
        self.executor = open_executor(config, path)
        self.cache = PagedCache(self.executor.pool, config.cache, quotas)
        self.tiering = None if opened is None else Tiering(self, path, *opened)
        self.tiers = None if self.tiering is None else self.tiering.tiers
        self.scheduler = Scheduler(config.scheduler, self.cache, self.executor.step_tokens, self.tiers)
        self.info = self._describe_model(path)
        executor, spec = self.executor, self.executor.spec
        self.planner = Planner(
            spec.num_layers, self.info.page_size, spec.hidden_size, executor.device, executor.least_saved_tokens
        )
        self.counters = dict.fromkeys(_COUNTED, 0)
        self.strategies: dict[str, Strategy] = {}
        self.decoding = self._open_model(path)
        self.counters |= self.decoding.counters
        self.step_rows = Histogram(_ROWS)
        self.decoding.counters = self.counters
        self.overlap = self.info.diffusion is None and choose_overlap(config, choose_device(config.model))
        eos = self.info.eos_token_ids
        self.grammars = GrammarCompiler(
            lambda: Tokenizer.load(path).to_json(), self.info.vocab_size, list(eos), config.engine.grammar_timeout
        )
        self.paused = False
        self.publisher = None if config.cache.kv_events is None else EventPublisher(config.cache)
        self.requests: dict[str, Request] = {}
        self.adapters = Adapters(self.executor, self.requests)
        self.admin = Admin(self)
        # Overlapping steps leave no time to look at tokens; canvases have no next token.
        drafts = config.engine.drafts == "auto" and self.info.diffusion is None and not self.overlap
        self.drafter = Drafter(self.cache.tree) if drafts else None
        self._in_flight: InFlight | None = None
        self._serial = 0
        self._step_s = 0.0
        self._pinning = Pinning(self.cache, self.strategy_of, self.add)
        if self.tiering is not None:
            self.tiering.recall()

    def _describe_model(self, path: Path) -> ModelInfo:
        executor, spec = self.executor, self.executor.spec
        return ModelInfo(
            name=model_name(self.config.model, path),
            path=str(path),
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            context_length=executor.context_length,
            eos_token_ids=list(spec.eos_token_ids),
            dtype=str(executor.dtype).removeprefix("torch."),
            device=str(executor.device),
            attention_backend=executor.backend_name,
            page_size=self.config.cache.page_size,
            pool_tokens=executor.pool.num_pages * self.config.cache.page_size,
            model_impl=executor.implementation,
        )

    def _open_model(self, path: Path) -> Decoding:
        """Install the strategy of the model's kind, and return its decoding."""
        executor, spec = self.executor, self.executor.spec
        if spec.diffusion is None:
            self.add_strategy(PrefixStrategy(self.cache, spec.num_layers))
            # Other strategies read spans whose positions are not consecutive, so that no window can be laid over them.
            if not executor.has_windows:
                self.add_strategy(Modules(self.cache, spec.num_layers, self.info))
            if not executor.has_windows and executor.implementation == "ramet":
                self.add_strategy(Fusion(self.cache, executor, self.info))
                self.add_strategy(ReasonCache(self.cache, executor, lambda: Tokenizer.load(path)))
            else:
                refuse_approximations(self.config.cache)
            sampler = make_sampler(executor.backend_name, spec.vocab_size, executor.device, executor.argmax)
            return NextToken(sampler)
        strategy: BlockPrefix | BiCache
        if spec.diffusion.attended is not None:
            strategy = (CanvasPrefix if executor.soften else BlockPrefix)(self.cache, spec.num_layers, spec.diffusion)
        else:
            strategy = BiCache.load(self.config.diffusion, path, spec, self.cache)
        self.add_strategy(strategy)
        self.info.diffusion = strategy.info
        return CanvasDecoding(spec.diffusion, executor.device, spec.vocab_size, executor.soften)

    def add_strategy(self, strategy: Strategy) -> None:
        """Serve requests that ask for a strategy by its name."""
        self.counters |= strategy.counters
        strategy.counters = self.counters
        self.strategies[strategy.name] = strategy

    @property
    def strategy(self) -> Strategy:
        """The strategy of requests that ask for none."""
        return next(iter(self.strategies.values()))

    def strategy_of(self, asked: dict[str, Any]) -> Strategy:
        """The strategy that the `reuse` fields of a message ask for. Raises InvalidRequest if there is none."""
        strategy = self.strategies.get(str(asked.get("method", self.strategy.name)))
        if strategy is None:
            raise InvalidRequest(f"no reuse method {asked['method']!r} for this model", param="reuse.method")
        return strategy

    def publish(self) -> None:
        """Publish the KV events since the last call."""
        if self.publisher is not None and self.cache.events is not None:
            self.publisher.publish(self.cache.events.take())
            for tier, events in self.tiers.worker.ledger.take().items() if self.tiers is not None else ():
                self.publisher.publish(events, tier)

    @property
    def idle_s(self) -> float | None:
        """Longest time between two calls of `publish` while there is nothing to do; None: no limit."""
        return None if self.publisher is None else _IDLE_WITH_EVENTS_S

    def close(self) -> None:
        """End the processes and close the sockets that belong to this engine."""
        if self.tiering is not None:
            self.tiering.close()
        self.executor.close()
        if self.publisher is not None:
            self.publisher.close()

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return (bool(self.requests) and not self.paused) or self._in_flight is not None or self.loading

    @property
    def loading(self) -> bool:
        """Whether tiers are waited for."""
        return self.tiering is not None and self.tiering.busy

    # -- messages --------------------------------------------------------------------------------------------

    def handle(self, message: Inbound) -> Outbound | None:
        """Take a message; returns what is to be answered at once, if anything."""
        if isinstance(message, AddRequest):
            return self.add(message)
        if isinstance(message, Abort):
            return StepEvents(self.abort(message.rid))
        if isinstance(message, AddPin):
            return self._pinning.pin(message)
        if isinstance(message, Shutdown):
            return None
        answer = self.admin.handle(message)
        return answer if self.tiering is None else self.tiering.handle(message, answer)

    def take_replies(self) -> list[Reply]:
        """Answers to calls that took some steps, since the last call."""
        replies = [reply for reply in self._pinning.take_replies() if reply.call > 0]
        return replies + ([] if self.tiering is None else self.tiering.take_replies())

    def add(self, message: AddRequest) -> StepEvents | None:
        """Accept a request; the front end has checked that it can be served and that its id is new."""
        try:
            strategy = self.strategy_of(message.reuse or {})
            self._serial += 1
            request = open_request(message, self.info, strategy, self.decoding, self._serial)
            self.adapters.check(request)
        except RametError as error:
            return StepEvents([TokenEvent(message.rid, [], _finish(error))])
        self.requests[request.rid] = request
        if request.sampling.constrained:
            self.grammars.start(request.rid, request.sampling, request.owner)
            self.scheduler.add(request, blocked_on=request.rid)
        else:
            self.scheduler.add(request)
        self.counters["requests"] += 1
        self.counters["prompt_tokens"] += request.num_prompt
        return None

    def abort(self, rid: str) -> list[TokenEvent]:
        """End a request; its terminal event, none if it is not live."""
        if rid not in self.requests:
            return []
        self.counters["aborted_requests"] += 1
        return self._end(self.requests[rid], Finish("abort", message="aborted"))

    # -- steps -----------------------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Run one step, or read the one that was launched before; returns its events."""
        self.cache.pins.expire()
        events = self._take_grammars() if self.grammars.open else []
        if self.tiering is not None and self.tiering.busy:
            self.tiering.take_loads(self._step_s)
        flight, self._in_flight = self._in_flight, None
        if flight is not None and any(self._is_live(item) for item in flight.work):
            for item in flight.work:
                item.ahead = 0  # the step before has been read
            events += self._compute(flight.work, flight)
        else:
            work = [] if self.paused else self.scheduler.schedule()
            if not work:
                if self.tiering is not None and self.tiering.busy:
                    self.tiering.tiers.wait(LOAD_WAIT_S)
                return events
            self._note_admitted(work)
            if self.drafter is not None:
                self.drafter.extend(work, self.scheduler.step_tokens)
            events += self._compute(work)
        if self.config.engine.debug_invariants:
            self.cache.check(self.scheduler.running)
        return events

    def _note_admitted(self, work: list[Work]) -> None:
        now = time.monotonic()
        for item in work:
            request = item.request
            if not request.admitted_s:
                request.admitted_s = now
                self.counters["queries"] += 1
                self.counters["hits"] += request.cached_tokens > 0
                self.counters["queried_tokens"] += request.num_prompt
                self.counters["cached_tokens"] += request.cached_tokens
                count_miss(self.cache, request)

    def _is_live(self, item: Work) -> bool:
        return self.requests.get(item.request.rid) is item.request

    def _compute(self, work: list[Work], flight: InFlight | None = None) -> list[TokenEvent]:
        """Launch a step, if it is not in flight already, then the one behind it, if that may be; read and book it."""
        try:
            flight = flight or self._launch(work)
            self._in_flight = self._launch_next(flight)
            tokens = flight.read()
        except EngineDead:
            raise
        except Exception as error:
            # The step that was launched behind it began with its tokens.
            self._in_flight = None
            return self._compute_less([item for item in work if self._is_live(item)], error)
        self.counters["steps"] += 1
        self.step_rows.add(flight.num_rows)
        return self._book(flight, tokens)

    def _launch(self, work: list[Work], before: InFlight | None = None) -> InFlight:
        """Let the device begin with a step; `before`: the one whose tokens it begins with, if they are not read yet."""
        started = time.monotonic()
        batch, places, saved, row_layers = self.planner.plan(work)
        self.counters["row_layers"] += row_layers
        if before is not None:
            in_order = sorted(range(len(work)), key=lambda i: places[i][0].start)
            batch.tokens = before.tokens_of([work[i].request for i in in_order])
        if self.tiers is not None:
            self.tiers.settle([group.kv_write for group in batch.groups])
        logits = self.executor.run(batch)
        chosen = self.decoding.choose(work, places, logits)
        return InFlight(work, places, saved, logits, len(batch.tokens), started, *chosen)

    def _launch_next(self, flight: InFlight) -> InFlight | None:
        """Launch the step behind one that has not been read, if it is known what it will be."""
        if not self.overlap or self.paused:
            return None
        work = self.scheduler.follow([item for item in flight.work if self._is_live(item)])
        if not work:
            return None
        try:
            return self._launch(work, flight)
        except EngineDead:
            raise
        except Exception as error:
            # Nobody is told: once the step before is read, this one is scheduled again, and run in halves if it must.
            log.warning("a step of %d requests could not be launched ahead (%r)", len(work), error)
            self._note_failed(work)
            return None

    def _book(self, flight: InFlight, tokens: Mapping[Request, list[int] | RametError]) -> list[TokenEvent]:
        """Book a step that was read, for the requests that are still live; returns its events."""
        logprobs = flight.logprobs()
        self._step_s = time.monotonic() - flight.started
        row_s = self._step_s / flight.num_rows
        if self.tiers is not None and any(item.prefills for item in flight.work):
            self.tiers.computed(flight.num_rows, self._step_s)
        if self.drafter is not None:
            self.drafter.note_step(flight.work, self._step_s)
        events: list[TokenEvent] = []
        for item, places, saved in zip(flight.work, flight.places, flight.saved, strict=True):
            if not self._is_live(item):
                continue
            request = item.request
            chosen = tokens.get(request, [])
            if isinstance(chosen, RametError):
                events += self._fail(request, chosen)
                continue
            if item.draft:
                chosen = self._keep(item, chosen)
            prefills = item.prefills and not request.strategy.takes_turns
            self.counters["prefill_tokens"] += item.count if prefills else 0
            if not request.strategy.book(item, saved, row_s * item.num_rows):
                self.scheduler.computed(request)
                continue
            if request.keep:
                keep_prompt(request, self.cache)
            if prefills:
                self.scheduler.computed(request)
            elif self.scheduler.blocked:
                self.scheduler.wake(request)
            try:
                measured = logprobs.get(request)
                found = Found(flight.logits, places, chosen, measured and measured[: len(chosen)])
                event = self.decoding.book(item, found)
            except RametError as error:
                events += self._fail(request, error)
                continue
            if event is not None:
                event.lookup, request.lookup = request.lookup, None
                event.cache, request.books = request.books, None
                self.counters["generation_tokens"] += len(event.tokens)
                events += [event] if event.finish is None else self._end(request, event.finish, event)
        return events

    def _keep(self, item: Work, tokens: list[int]) -> list[int]:
        """The tokens of a request with a draft, up to one that ends it; the draft's other rows are left out."""
        tokens, drafted = self.decoding.cut(item.request, tokens), len(item.draft)
        item.keep(len(tokens))
        item.request.drafted += drafted
        item.request.accepted += len(item.draft)
        self.counters["drafts"] += 1
        self.counters["drafted_tokens"] += drafted
        self.counters["accepted_tokens"] += len(item.draft)
        return tokens

    # -- failures --------------------------------------------------------------------------------------------

    def _note_failed(self, work: list[Work]) -> None:
        """Book a step that failed; tokens that it may have counted for penalties are counted again."""
        self.counters["failed_steps"] += 1
        for item in work:
            item.request.counts = None
            if item.draft:
                item.keep(1)

    def _compute_less(self, work: list[Work], error: Exception) -> list[TokenEvent]:
        """After a step that failed: in halves, so that only the request at fault fails; without memory, fewer rows.

        Raises EngineDead if the device cannot be used any more.
        """
        if is_lost(self.executor.device):
            raise EngineDead(f"{self.executor.device} cannot be used any more after {error!r}") from error
        drafted = any(item.draft for item in work)
        self._note_failed(work)
        if drafted:
            log.warning("a step of %d requests failed (%r) and is run again without drafts", len(work), error)
            return self._compute(work)
        if len(work) > 1:
            log.warning("a step of %d requests failed (%r) and is run again in halves", len(work), error)
            middle = len(work) // 2
            return self._compute(work[:middle]) + self._compute(work[middle:])
        (item,) = work
        if is_out_of_memory(error) and item.request.strategy.shrink(item):
            log.warning("the rows of request %s did not fit into memory and are run again in halves", item.request.rid)
            return self._compute(work)
        log.error("request %s failed", item.request.rid, exc_info=error)
        message = f"the step that computed this request failed: {type(error).__name__}"
        return self._fail(item.request, RametError(message))

    def _fail(self, request: Request, error: RametError) -> list[TokenEvent]:
        """End a request with an error; nothing of it is kept."""
        self.counters["failed_requests"] += 1
        if isinstance(error, BadLogits):
            self.counters["bad_logits"] += 1
            request.strategy.distrust(request)
        return self._end(request, _finish(error), keep=False)

    def _take_grammars(self) -> list[TokenEvent]:
        """Wake requests whose grammar is compiled; returns the events of those whose grammar failed."""
        failed = []
        for rid, grammar in self.grammars.take():
            request = self.requests[rid]
            if isinstance(grammar, RametError):
                failed += self._fail(request, grammar)
            else:
                request.grammar = grammar
                self.scheduler.wake(rid)
        return failed

    def _end(
        self, request: Request, finish: Finish, event: TokenEvent | None = None, keep: bool = True
    ) -> list[TokenEvent]:
        """Take a request out; its terminal event, none for the computation of a pin, whose call is answered."""
        del self.requests[request.rid]
        self.adapters.ended()
        if request.sampling.constrained and request.grammar is None:
            self.grammars.cancel(request.rid)
        self.scheduler.remove(request, keep)
        if self.drafter is not None and keep and request.store:
            self.drafter.ended(request)
        if self._pinning.ended(request.rid, finish):
            return []
        return [event or TokenEvent(request.rid, [], finish, cached_tokens=max(request.cached_tokens, 0))]


def _check_files(config: Config, path: Path) -> None:
    """Read the files of `--lora` and `--depth-table`. Raises ModelError."""
    for name, directory in config.model.adapters:
        try:
            read_lora(Path(directory))
        except ModelError as error:
            raise ModelError(f"--lora {name}={directory}: {error.message}") from None
    if config.diffusion.depth_table is not None:
        spec = own_spec(config.model, path)
        if spec is not None and spec.diffusion is not None:
            read_table(config.diffusion.depth_table, spec)


def _finish(error: RametError) -> Finish:
    refused = isinstance(error, InvalidRequest)
    return Finish("error", message=error.message, refused=refused, code=error.code, param=error.param)
