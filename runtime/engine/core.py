"""EngineCore: requests in, token events out, one step at a time. No threads, no sockets."""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from radix.stats import Histogram
from runtime.calls import State
from runtime.config import Config
from runtime.engine.flight import InFlight
from runtime.engine.open_calls import OpenCalls
from runtime.engine.part import Part, Parts
from runtime.engine.requests import finish_of, open_request
from runtime.engine.scheduler import Scheduler
from runtime.engine.strategies import Strategies
from runtime.errors import EngineDead, RametError
from runtime.execution.device import (
    choose_device,
    choose_overlap,
    is_lost,
    is_out_of_memory,
    most_running,
    step_tokens,
)
from runtime.execution.executor import Executor
from runtime.kv.cache import PagedCache
from runtime.kv.misses import count_miss
from runtime.protocol import Abort, AddRequest, CallEngine, Finish, Forget, Inbound, ModelInfo, Reply, TokenEvent
from runtime.request import AnyStrategy, Decoding, Request, Work
from runtime.reuse.planner import Planner
from runtime.sampler_state import StepResult
from runtime.sampling.sampler import BadLogits

log = logging.getLogger("ramet.engine")

_COUNTED = (
    "requests", "aborted_requests", "failed_requests", "failed_steps", "bad_logits", "prompt_tokens",
    "queries", "hits", "queried_tokens", "cached_tokens", "generation_tokens", "prefill_tokens", "steps",
    "row_layers", "overlapped_steps", "drafts", "drafted_tokens", "accepted_tokens", "next_turn_tokens",
)  # fmt: skip

# Bounds of the histogram of a step's token rows.
_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

P = TypeVar("P", bound=Part)


class EngineCore:
    """Computes live requests step by step, together with its parts. `open_engine` makes one.

    With `overlap`, decode runs one step ahead: before the tokens of a step are read, the next step is launched with
    these tokens on the device, so that the host reads, books, schedules and plans while the device computes. If a
    request of the next step needs its output to choose a token, as grammars do, all of its tokens are chosen after the
    booking, and the device still computes logits meanwhile. If a request ends with a step, its rows of the next step
    are dropped. This is safe: they are in the request's private pages, behind all rows that may enter the tree, and
    only later steps overwrite them.

    Attributes:
        counters: the core's own; `totals` also counts for the strategies and the decoding.
        parts: see `Part`.
        calls: operators' calls that are being answered.
        requests: the live requests by id, in the order of arrival.
        paused: whether no steps run.
    """

    def __init__(
        self,
        config: Config,
        executor: Executor,
        cache: PagedCache,
        info: ModelInfo,
        strategies: Strategies,
        decoding: Decoding,
    ):
        self.config, self.executor, self.cache, self.info = config, executor, cache, info
        self.counters = dict.fromkeys(_COUNTED, 0)
        self.step_rows = Histogram(_ROWS)
        self.strategies = strategies
        self.decoding = decoding
        spec, device, least = executor.spec, executor.device, executor.decoder.least_saved_tokens
        self.scheduler = Scheduler(config.scheduler, cache, step_tokens(device), most_running(device))
        self.planner = Planner(spec.num_layers, info.page_size, spec.hidden_size, device, least)
        self.overlap = info.decoding is None and choose_overlap(config, choose_device(config.model))
        self.paused = False
        self.requests: dict[str, Request] = {}
        self.parts, self.calls = Parts(), OpenCalls()
        self.scheduler.blocked_on = self.parts.blocked_on
        self._in_flight: InFlight | None = None
        self._serial, self._step_s = 0, 0.0

    def add_part(self, part: Part) -> None:
        """Add a part; the engine works without any."""
        self.parts.add(part)
        self.calls.learn(part.answers())

    def part(self, kind: type[P]) -> P:
        """The part of a class. Raises StopIteration if the engine has none."""
        return next(part for part in self.parts if isinstance(part, kind))

    def totals(self) -> Counter[str]:
        """The counters of the core, its strategies and its decoding, by name. Those of the same name are added."""
        total = Counter(self.counters)
        counting_parts: list[AnyStrategy | Decoding] = [*self.strategies.opened.values(), self.decoding]
        for counting in counting_parts:
            total.update(counting.counters)
        return total

    def state(self) -> State:
        """Counters, histograms and gauges of all parts."""
        state = State()
        for part in self.parts:
            part.report(state)
        return state

    @property
    def busy(self) -> bool:
        """Whether requests, calls or parts need a step."""
        runs = bool(self.requests) and not self.paused
        return runs or self._in_flight is not None or bool(self.calls.open) or self.parts.busy

    def close(self) -> None:
        """End the processes and close the sockets that belong to this engine."""
        for part in self.parts:
            part.close()
        self.executor.close()

    # -- messages --------------------------------------------------------------------------------------------

    def handle(self, message: Inbound) -> list[TokenEvent]:
        """Handle a message; returns the terminal events of requests that it ends."""
        if isinstance(message, AddRequest):
            return self.add(message)
        if isinstance(message, Abort):
            return self.abort(message.rid)
        if isinstance(message, CallEngine):
            self.calls.ask(message.number, message.call)
        elif isinstance(message, Forget):
            self.calls.forget(message.number)
        return []

    def settle(self) -> list[Reply]:
        """Let parts publish the results of a message or a step; returns replies to operators' calls."""
        for settle in self.parts.settle:
            settle()
        return self.calls.replies() if self.calls.open else []

    def add(self, message: AddRequest) -> list[TokenEvent]:
        """Accept a request with a new id; returns the terminal event if the request is refused."""
        try:
            strategy = self.strategies.serving(message.ask)
            self._serial += 1
            request = open_request(message, self.info, strategy, self.decoding, self._serial)
            for added in self.parts.added:
                added(request)
        except Exception as error:
            return [TokenEvent(message.rid, [], finish_of(error, message.rid))]
        self.requests[request.rid] = request
        self.scheduler.add(request)
        self.counters["requests"] += not message.idle
        self.counters["prompt_tokens"] += 0 if message.idle else request.num_prompt
        return []

    def abort(self, rid: str) -> list[TokenEvent]:
        """End a request; returns its terminal event, nothing if the request is not live."""
        if rid not in self.requests:
            return []
        self.counters["aborted_requests"] += 1
        return [self._end(self.requests[rid], Finish("abort", message="aborted"))]

    # -- steps -----------------------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Run one step, or read the step that was launched ahead; returns its events."""
        events: list[TokenEvent] = []
        if self.scheduler.blocked or self.parts.waiting:
            for poll in self.parts.poll:
                events += poll(self._step_s)
        flight, self._in_flight = self._in_flight, None
        work = [] if flight is None else flight.work
        for item in work:
            item.ahead = 0  # the previous step has been read
        if any([item.is_live for item in work]):
            events += self._compute(work, flight)
        elif work := self._schedule(events):
            events += self._compute(work)
        if self.config.engine.debug_invariants:
            self.cache.check(self.scheduler.running)
        return events

    def _schedule(self, events: list[TokenEvent]) -> list[Work]:
        """The work of the next step. `events` gets that of a request whose strategy fails; then there is no work."""
        try:
            work = [] if self.paused else self.scheduler.schedule()
        except Exception as error:
            events.append(self.fail(self.scheduler.at, error))
            return []
        for item in work:
            if not (item.request.admitted_s or item.request.message.idle):
                self._note_admitted(item.request)
        if work:
            for scheduled in self.parts.scheduled:
                scheduled(work)
        return work

    def _note_admitted(self, request: Request) -> None:
        request.note_admitted(time.monotonic())
        self.counters["queries"] += 1
        self.counters["hits"] += request.cached_tokens > 0
        self.counters["queried_tokens"] += request.num_prompt
        self.counters["cached_tokens"] += request.cached_tokens
        if request.strategy.keeps_prompts:
            count_miss(self.cache, request.key(request.prompt_len), request.namespace, request.cached_tokens)

    def _compute(self, work: list[Work], flight: InFlight | None = None) -> list[TokenEvent]:
        """Launch a step unless it is in flight, launch the next one if possible, then read and book the first."""
        try:
            flight = flight or self._launch(work)
            self._in_flight = self._launch_next(flight)
            tokens = {} if flight.sampled is None else flight.sampled.chosen()
        except EngineDead:
            raise
        except Exception as error:
            # The next step was launched with the tokens of this one.
            self._in_flight = None
            return self._compute_less([item for item in work if item.is_live], error)
        self.counters["steps"] += 1
        self.step_rows.add(flight.num_rows)
        if flight.sampled is not None and flight.sampled.changed:
            self._in_flight = None  # it computes other tokens
        events = self._book(flight, tokens)
        if self._in_flight is not None and self._in_flight.sampled is None:
            self._in_flight = self._choose_ahead(self._in_flight)
        return events

    def _launch(self, work: list[Work], before: InFlight | None = None) -> InFlight:
        """Start a step on the device; `before`: the step whose unread tokens are the input."""
        started = time.monotonic()
        batch, logit_rows, saved, row_layers, version = self.planner.plan(work)
        self.counters["row_layers"] += row_layers
        self.counters["overlapped_steps"] += before is not None
        if before is not None:
            assert before.sampled is not None
            in_order = sorted(range(len(work)), key=lambda i: logit_rows[i][0].start)
            batch.tokens = before.sampled.on_device([work[i].request for i in in_order])
        for launching in self.parts.launching:
            launching(batch)
        logits = self.executor.run(batch)
        flight = InFlight(work, logit_rows, saved, logits, len(batch.tokens), started, version)
        if before is None or not flight.needs_output:
            flight.sampled = self.decoding.choose(work, logit_rows, logits, version)
        return flight

    def _launch_next(self, flight: InFlight) -> InFlight | None:
        """Launch the step after `flight`, whose tokens are unread; None if its work is not known yet."""
        ahead = self.overlap and not self.paused
        work = self.scheduler.follow([item for item in flight.work if item.is_live]) if ahead else []
        if not work:
            return None
        with self._giving_up(work):
            return self._launch(work, flight)
        return None

    def _choose_ahead(self, flight: InFlight) -> InFlight | None:
        """Choose the tokens of a step whose requests have been booked; None if none goes on, or if this fails."""
        flight = flight.live
        for item in flight.work:
            item.ahead = 0
        with self._giving_up(flight.work):
            work, logit_rows, logits = flight.work, flight.logit_rows, flight.logits
            flight.sampled = self.decoding.choose(work, logit_rows, logits, flight.version) if work else None
        return flight if flight.sampled is not None else None

    @contextmanager
    def _giving_up(self, work: list[Work]) -> Iterator[None]:
        """A context in which a step ahead may fail. Its work is scheduled again, if necessary in halves."""
        try:
            yield
        except EngineDead:
            raise
        except Exception as error:
            log.warning("a step of %d requests could not be launched ahead (%r)", len(work), error)
            self._note_failed(work)

    def _book(self, flight: InFlight, tokens: Mapping[Request, list[int] | RametError]) -> list[TokenEvent]:
        """Book the results of a step for the requests that are still live; returns their events."""
        logprobs = {} if flight.sampled is None else flight.sampled.logprobs()
        self._step_s = time.monotonic() - flight.started
        row_s = self._step_s / flight.num_rows
        for booked in self.parts.booked:
            booked(flight.work, flight.num_rows, self._step_s)
        events: list[TokenEvent] = []
        for item, logit_rows, saved in zip(flight.work, flight.logit_rows, flight.saved, strict=True):
            if not item.is_live:
                continue
            request = item.request
            chosen = tokens.get(request, [])
            try:
                if isinstance(chosen, RametError):
                    raise chosen
                if item.draft:
                    chosen = self._verify(item, chosen)
                if not self._book_rows(item, saved, row_s * item.num_rows):
                    continue
                measured = logprobs.get(request)
                result = StepResult(flight.logits, logit_rows, chosen, measured and measured[: len(chosen)])
                event = self.decoding.book(item, result)
            except Exception as error:
                events.append(self.fail(request, error))
                continue
            if event is not None:
                self.counters["generation_tokens"] += len(event.tokens)
                events.append(event if event.finish is None else self._end(request, event.finish, event))
        return events

    def _verify(self, item: Work, tokens: list[int]) -> list[int]:
        """The new tokens of a request with a draft, up to one that ends it. Drops the draft's other rows."""
        tokens, drafted, event = self.decoding.cut(item.request, tokens), len(item.draft), item.request.event
        item.keep(len(tokens))
        event.drafted += drafted
        event.accepted += len(item.draft)
        self.counters["drafts"] += 1
        self.counters["drafted_tokens"] += drafted
        self.counters["accepted_tokens"] += len(item.draft)
        return tokens

    def _book_rows(self, item: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        """Book the rows of a piece of work; returns whether their logits give tokens."""
        request, prefills = item.request, item.prefills
        in_chunks = prefills and not request.strategy.unchunkable
        if in_chunks:
            self.counters["next_turn_tokens" if request.message.idle else "prefill_tokens"] += item.count
        gives_tokens = request.lease.book(item, saved, seconds)
        if gives_tokens and prefills:
            for prefilled in self.parts.prefilled:
                prefilled(request)
        if in_chunks or not gives_tokens:
            self.scheduler.computed(request)
        elif self.scheduler.blocked:
            self.scheduler.wake(request)
        return gives_tokens

    # -- failures and ends -----------------------------------------------------------------------------------

    def _note_failed(self, work: list[Work]) -> None:
        """Count a failed step, drop its drafts, and have token counts for penalties made again."""
        self.counters["failed_steps"] += 1
        for item in work:
            item.request.sampler.seen = None
            if item.draft:
                item.keep(1)

    def _compute_less(self, work: list[Work], error: Exception) -> list[TokenEvent]:
        """Run a failed step again: without drafts, then in halves until only the request at fault fails.

        A single request that needs too much memory runs with fewer rows. Raises EngineDead if the device is lost.
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
        try:
            shrunk = is_out_of_memory(error) and item.request.lease.shrink(item)
        except Exception as broken:
            error, shrunk = broken, False
        if shrunk:
            log.warning("the rows of request %s did not fit into memory and are run again in halves", item.request.rid)
            return self._compute(work)
        return [self.fail(item.request, error)]

    def fail(self, request: Request | None, error: Exception) -> TokenEvent:
        """End a request with an error, and cache none of its KV. Raises the error if it is no single request's."""
        if request is None or isinstance(error, EngineDead):
            raise error
        self.counters["failed_requests"] += 1
        if isinstance(error, BadLogits):
            self.counters["bad_logits"] += 1
            request.lease.distrust()
        return self._end(request, finish_of(error, request.rid))

    def _end(self, request: Request, finish: Finish, event: TokenEvent | None = None) -> TokenEvent:
        """Remove a request; returns its terminal event."""
        del self.requests[request.rid]
        self.scheduler.remove(request, keep=finish.type != "error")
        for ended in self.parts.ended:
            ended(request, finish)
        if event is None:
            event, event.finish = request.event, finish
        return event
