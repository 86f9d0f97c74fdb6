"""EngineCore: requests in, token events out, one step at a time. No threads, no sockets."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from radix import view
from radix.stats import Histogram
from runtime.batch import ForwardBatch
from runtime.config import Config
from runtime.engine.in_flight import Flight
from runtime.engine.inspector import Inspector, describe
from runtime.engine.scheduler import Scheduler, Work
from runtime.errors import EngineDead, InvalidRequest, RametError
from runtime.execution.device import choose_device, choose_overlap, is_lost, is_out_of_memory
from runtime.execution.parallel.driver import open_executor
from runtime.execution.transfers import upload
from runtime.kv.cache import PagedCache
from runtime.kv.publisher import EventPublisher
from runtime.models.resolve import model_name
from runtime.models.tokenizer import Tokenizer
from runtime.params import SamplingParams
from runtime.protocol import (
    Abort,
    AddPin,
    AddRequest,
    Finish,
    FlushCache,
    GetOutline,
    GetPins,
    GetRequests,
    GetState,
    GetTree,
    Inbound,
    ModelInfo,
    OnNode,
    Outbound,
    Pause,
    RemovePin,
    Reply,
    StepEvents,
    TokenEvent,
    TokenLogprob,
)
from runtime.request import Request
from runtime.reuse.prefix import plan_prefix
from runtime.sampling.grammar import GrammarCompiler
from runtime.sampling.logprobs import report_logprobs
from runtime.sampling.sampled import BadLogits, Sampled

log = logging.getLogger("ramet.engine")


class EngineCore:
    """The engine without its surroundings.

    With `overlap`, steady decode runs one step ahead: before the tokens of a step are read, the next one is launched,
    with these tokens where the device has them, so that the host reads, books, schedules and plans while the device
    computes. What such a step computed for requests that turn out to have ended is thrown away: its rows lie in pages
    that are private to them, behind all that may come into the tree, and whoever gets these pages next writes later.
    """

    def __init__(self, config: Config, path: Path, quotas: Mapping[str, int] | None = None):
        """Load the model directory `path`; `quotas`: cached pages by tenant. Raises ModelError."""
        self.config = config
        self.overlap = choose_overlap(config, choose_device(config.model))
        self.executor = open_executor(config, path)
        self.cache = PagedCache(self.executor.pool, config.cache, quotas)
        self.inspector = Inspector(self.cache)
        self.scheduler = Scheduler(config.scheduler, self.cache, self.executor.step_tokens)
        spec = self.executor.spec
        self.sampler = self.executor.make_sampler()
        self._flight: Flight | None = None
        self.info = ModelInfo(
            name=model_name(config.model, path),
            path=str(path),
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            context_length=self.executor.context_length,
            eos_token_ids=list(spec.eos_token_ids),
            dtype=str(self.executor.dtype).removeprefix("torch."),
            device=str(self.executor.device),
            attention_backend=self.executor.backend_name,
            page_size=config.cache.page_size,
            pool_tokens=self.executor.pool.num_pages * config.cache.page_size,
        )
        self.grammars = GrammarCompiler(
            lambda: Tokenizer.load(path).to_json(),
            *(spec.vocab_size, list(spec.eos_token_ids), config.engine.grammar_timeout),
        )
        self.paused = False
        self.publisher = self._make_publisher()
        self.requests: dict[str, Request] = {}
        self.counters = dict.fromkeys(
            [
                "requests",
                "aborted_requests",
                "failed_requests",
                "failed_steps",
                "bad_logits",
                "prompt_tokens",
                "queries",
                "hits",
                "queried_tokens",
                "cached_tokens",
                "generation_tokens",
                "prefill_tokens",
                "steps",
            ],
            0,
        )
        self._sequence = 0

    def _make_publisher(self) -> EventPublisher | None:
        cache = self.config.cache
        if cache.kv_events is None:
            return None
        medium = "GPU" if self.executor.device.type == "cuda" else "CPU"
        return EventPublisher(cache.kv_events, cache.kv_events_replay, cache.page_size, medium, cache.kv_events_tokens)

    def publish(self) -> None:
        """Tell the subscribers what has changed in the tree since the last call."""
        if self.publisher is not None and self.cache.events is not None:
            self.publisher.publish(self.cache.events.take())

    def close(self) -> None:
        """End what else runs for this engine."""
        self.executor.close()

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return (bool(self.requests) and not self.paused) or self._flight is not None

    def handle(self, message: Inbound) -> Outbound | None:
        """Take a message; what is to be answered at once, if anything."""
        if isinstance(message, AddRequest):
            self.add(message)
        elif isinstance(message, Abort):
            return StepEvents(self.abort(message.rid))
        elif isinstance(message, FlushCache):
            return Reply(message.call, self.flush(message.pins))
        elif isinstance(message, AddPin):
            tokens = array("i")
            tokens.frombytes(message.tokens)
            board = self.cache.pins
            return Reply(message.call, board.pin(tokens, message.namespace, message.name, message.ttl_s))
        elif isinstance(message, RemovePin):
            return Reply(message.call, {"found": self.cache.pins.unpin(message.pin)})
        elif isinstance(message, GetPins):
            return Reply(message.call, self.pins())
        elif isinstance(message, GetTree):
            return Reply(message.call, self.tree(message))
        elif isinstance(message, GetOutline):
            return Reply(message.call, self.inspector.outline(message.limit, message.preview_tokens, message.anew))
        elif isinstance(message, OnNode):
            act = getattr(self.inspector, message.verb)
            return Reply(message.call, act(message.page, message.start))
        elif isinstance(message, GetRequests):
            now_s = time.monotonic()
            live = [describe(request, now_s) for request in islice(self.requests.values(), message.limit)]
            return Reply(message.call, {"requests": live})
        elif isinstance(message, Pause):
            self.paused = message.paused
            return Reply(message.call, {"paused": self.paused})
        elif isinstance(message, GetState):
            return Reply(message.call, self.state())
        return None

    def add(self, message: AddRequest) -> None:
        """Accept a request; the front end has checked that it can be served and that its id is new."""
        tokens = array("i")
        tokens.frombytes(message.tokens)
        sampling = SamplingParams.model_construct(**message.sampling)
        eos = () if sampling.ignore_eos else self.info.eos_token_ids
        room = min(self.info.context_length, self.info.pool_tokens) - len(tokens)
        limit = room if sampling.max_new_tokens is None else sampling.max_new_tokens
        self._sequence += 1
        request = Request(
            rid=message.rid,
            tokens=tokens,
            prompt_len=len(tokens),
            sampling=sampling,
            stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
            max_tokens=len(tokens) + limit,
            namespace=message.namespace,
            logprobs=message.logprobs,
            prompt_logprobs_from=message.prompt_logprobs_from,
            priority=message.priority,
            sequence=self._sequence,
            arrival_s=time.monotonic(),
        )
        self.requests[request.rid] = request
        if sampling.constrained:
            self.grammars.start(request.rid, sampling, request.namespace.owner)
        else:
            self.scheduler.add(request)
        self.counters["requests"] += 1
        self.counters["prompt_tokens"] += request.prompt_len

    def abort(self, rid: str) -> list[TokenEvent]:
        """End a request; its terminal event, none if it is not live."""
        if rid not in self.requests:
            return []
        self.counters["aborted_requests"] += 1
        return [self._end(self.requests[rid], Finish("abort", message="aborted"))]

    def flush(self, pins: bool = False) -> dict[str, Any]:
        """Drop every cached page that no live request uses; pinned ones only if asked."""
        page_size = self.info.page_size
        self.cache.pins.expire()
        if pins:
            self.cache.pins.unpin_all()
        return {
            "flushed_tokens": self.cache.flush() * page_size,
            "live_tokens": self.cache.tree.num_pages * page_size,
        }

    def step(self) -> list[TokenEvent]:
        """Run one step, or read the one that was launched before, and tell what came of it."""
        self.cache.pins.expire()
        events = self._take_grammars()
        flight, self._flight = self._flight, None
        if flight is not None and any(self._is_live(item) for item in flight.work):
            for item in flight.work:
                item.ahead = 0  # the step before has been read
            events += self._compute(flight.work, flight)
        else:
            work = [] if self.paused else self.scheduler.schedule()
            if not work:
                return events
            self._note_admitted(work)
            events += self._compute(work)
        if self.config.engine.debug_invariants:
            self.cache.check(self.scheduler.running)
        return events

    def _note_admitted(self, work: list[Work]) -> None:
        now = time.monotonic()
        for item in work:
            if not item.request.admitted_s:
                item.request.admitted_s = now
                self.counters["queries"] += 1
                self.counters["hits"] += item.request.cached_tokens > 0
                self.counters["queried_tokens"] += item.request.prompt_len
                self.counters["cached_tokens"] += item.request.cached_tokens

    def _is_live(self, item: Work) -> bool:
        return self.requests.get(item.request.rid) is item.request

    def _compute(self, work: list[Work], flight: Flight | None = None) -> list[TokenEvent]:
        """Launch a step, if it is not in flight already, then the one behind it, if that may be; read and book it."""
        try:
            flight = flight or self._launch(work)
            self._flight = self._launch_next(flight)
            tokens = flight.read()
        except EngineDead:
            raise
        except Exception as error:
            # What was launched behind it began with its tokens.
            self._flight = None
            return self._compute_less([item for item in work if self._is_live(item)], error)
        self.counters["steps"] += 1
        return [event for event in self._book(flight, tokens) if event is not None]

    def _launch(self, work: list[Work], before: Flight | None = None) -> Flight:
        """Let the device begin with a step; `before`: the one whose tokens it begins with, if nobody has read them."""
        started = time.monotonic()
        batch = self._plan(work)
        if before is not None:
            in_order = sorted(work, key=lambda item: item.logits.start)
            batch.tokens = before.tokens_of([item.request for item in in_order])
        logits = self.executor.run(batch)
        return Flight(work, batch, logits, started, *self._choose(work, logits))

    def _launch_next(self, flight: Flight) -> Flight | None:
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

    def _plan(self, work: list[Work]) -> ForwardBatch:
        executor = self.executor
        return plan_prefix(work, executor.spec.num_layers, self.info.page_size, executor.least_saved_tokens)

    def _choose(self, work: list[Work], logits: torch.Tensor) -> tuple[list[Request], Sampled | None]:
        """Choose the next tokens of those that want one, and tell whose they are."""
        asking = [item for item in work if item.samples and item.request.wants_tokens]
        if not asking:
            return [], None
        asking.sort(key=lambda item: item.logits.start)
        requests = [item.request for item in asking]
        rows = [item.logits.stop - 1 for item in asking]
        if rows != list(range(len(logits))):
            logits = logits[upload(torch.tensor(rows), logits.device)]
        return requests, self.sampler.sample(logits, requests, asking[0].ahead)

    def _book(self, flight: Flight, tokens: Mapping[Request, int | RametError]) -> list[TokenEvent | None]:
        """Make events of a step that was read; what it computed for requests that have ended meanwhile is nothing."""
        work = [item for item in flight.work if self._is_live(item)]
        logprobs = flight.logprobs()
        self.counters["generation_tokens"] += sum(item.request in tokens for item in work)
        self.counters["prefill_tokens"] += sum(item.count for item in work if item.request.num_remaining > 1)
        row_s = (time.monotonic() - flight.started) / len(flight.batch.tokens)
        return [
            self._advance(item, flight.logits[item.logits], tokens.get(item.request), logprobs.get(item.request), row_s)
            for item in work
        ]

    def _note_failed(self, work: list[Work]) -> None:
        """Book a step that failed; what it may have counted of its tokens is counted again."""
        self.counters["failed_steps"] += 1
        for item in work:
            item.request.counts = None

    def _compute_less(self, work: list[Work], error: Exception) -> list[TokenEvent]:
        """After a step that failed: in halves, so that only who is at fault fails; without memory, fewer rows of it.

        Raises EngineDead if the device cannot be used any more.
        """
        if is_lost(self.executor.device):
            raise EngineDead(f"{self.executor.device} cannot be used any more after {error!r}") from error
        self._note_failed(work)
        if len(work) > 1:
            log.warning("a step of %d requests failed (%r) and is run again in halves", len(work), error)
            middle = len(work) // 2
            return self._compute(work[:middle]) + self._compute(work[middle:])
        (item,) = work
        if is_out_of_memory(error) and item.shrink():
            log.warning("the rows of request %s did not fit into memory and are run again in halves", item.request.rid)
            return self._compute(work)
        log.error("request %s failed", item.request.rid, exc_info=error)
        message = f"the step that computed this request failed: {type(error).__name__}"
        return [self._fail(item.request, RametError(message))]

    def _fail(self, request: Request, error: RametError) -> TokenEvent:
        """End a request with an error; nothing of it is kept."""
        self.counters["failed_requests"] += 1
        refused = isinstance(error, InvalidRequest)
        return self._end(request, Finish("error", message=error.message, refused=refused), keep=False)

    def _take_grammars(self) -> list[TokenEvent]:
        """Let those wait whose grammar is compiled; the events of those whose grammar failed."""
        failed = []
        for rid, grammar in self.grammars.take():
            request = self.requests[rid]
            if isinstance(grammar, RametError):
                failed.append(self._fail(request, grammar))
            else:
                request.grammar = grammar
                self.scheduler.add(request)
        return failed

    def _advance(
        self,
        item: Work,
        logits: torch.Tensor,
        token: int | RametError | None,
        logprob: TokenLogprob | None,
        row_s: float,
    ) -> TokenEvent | None:
        """Book one piece of computed work; `row_s` is what each of the step's rows took."""
        request = item.request
        if isinstance(token, RametError):
            self.counters["bad_logits"] += isinstance(token, BadLogits)
            return self._fail(request, token)
        prompt_logprobs = self._prompt_logprobs(request, item.count, logits)
        prefilled = request.num_remaining > 1
        read = item.samples and not request.wants_tokens
        request.num_computed += item.count
        if prefilled:
            self.cache.commit(request, row_s * item.count)
            self.scheduler.computed(request)
        if token is None and prompt_logprobs is None and not read:
            return None
        event = TokenEvent(
            request.rid, [], prompt_logprobs=prompt_logprobs, cached_tokens=max(request.cached_tokens, 0)
        )
        if token is not None:
            event.logprobs = None if logprob is None else [logprob]
            request.tokens.append(token)
            request.first_token_s = request.first_token_s or time.monotonic()
            event.tokens = [token]
            event.finish = self._finish_reason(request, token)
        elif read:
            event.finish = Finish("length")
        event.queue_s = request.admitted_s - request.arrival_s
        event.prefill_s = max(request.first_token_s - request.admitted_s, 0.0)
        if event.finish is not None:
            self._end(request, event.finish)
        return event

    def _prompt_logprobs(self, request: Request, count: int, logits: torch.Tensor) -> list[TokenLogprob] | None:
        """Log-probabilities of the prompt tokens that this work's rows predict."""
        if not request.wants_prompt_logprobs:
            return None
        wanted, computed = request.prompt_logprobs_from or 0, request.num_computed
        end = min(computed + count + 1, request.prompt_len)
        tokens = request.tokens[max(wanted, computed + 1) : end].tolist()
        found = report_logprobs(logits[: len(tokens)], tokens, request.logprobs or 0) if tokens else []
        if wanted == 0:
            found.insert(0, TokenLogprob(request.tokens[0], None, []))
        request.prompt_logprobs_from = max(wanted, end)
        return found

    def _finish_reason(self, request: Request, token: int) -> Finish | None:
        if token in request.stop_ids and request.num_output >= request.sampling.min_new_tokens:
            return Finish("stop", matched=token)
        if request.grammar is not None and request.grammar.complete:
            return Finish("stop")
        if len(request.tokens) >= request.max_tokens:
            return Finish("length")
        return None

    def _end(self, request: Request, finish: Finish, keep: bool = True) -> TokenEvent:
        del self.requests[request.rid]
        if request.sampling.constrained and request.grammar is None:
            self.grammars.cancel(request.rid)
        else:
            self.scheduler.remove(request, keep)
        return TokenEvent(request.rid, [], finish, cached_tokens=max(request.cached_tokens, 0))

    def pins(self) -> dict[str, Any]:
        """All pins, and what they hold of their budget."""
        board = self.cache.pins
        board.expire()
        return {
            "pins": [board.describe(pin) for pin in board.pins.values()],
            "pinned_tokens": self.cache.tree.num_pinned_pages * self.info.page_size,
            "budget_tokens": board.budget_pages * self.info.page_size,
        }

    def tree(self, asked: GetTree) -> dict[str, Any]:
        """A page of the tree's nodes, parents first."""
        self.cache.pins.expire()
        nodes = view(
            self.cache.tree,
            lambda namespace: asked.tenant is None or namespace.tenant == asked.tenant,
            asked.max_depth,
            asked.skip,
            asked.limit,
            asked.preview_tokens,
        )
        return {"nodes": [asdict(node) for node in nodes]}

    def state(self) -> dict[str, Any]:
        """Counters and histograms (they only grow) and gauges."""
        cache, stats = self.cache, self.cache.tree.stats
        cache.pins.expire()
        page_size = self.info.page_size
        tree_pages = cache.tree.num_pages
        return {
            **self.counters,
            "evicted_tokens": sum(stats.evicted.values()) * page_size,
            "evicted_tokens_by_cause": {cause: pages * page_size for cause, pages in stats.evicted.items()},
            "retracted_requests": self.scheduler.num_retracted,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting) + len(self.grammars),
            "paused": int(self.paused),
            "pages_total": cache.pool.num_pages,
            "pages_free": cache.allocator.num_free,
            "pages_tree": tree_pages,
            "pages_private": cache.pool.num_pages - cache.allocator.num_free - tree_pages,
            "pages_locked": cache.tree.num_locked_pages,
            "pages_pinned": cache.tree.num_pinned_pages,
            "pins": len(cache.pins.pins),
            "pins_refused": cache.pins.num_refused,
            "pins_broken": cache.pins.num_broken,
            "tree_nodes": cache.tree.num_nodes,
            "idle_before_evict_s": _plain(stats.idle_s),
            "lifetime_s": _plain(stats.lifetime_s),
            "reuse_gap_s": _plain(stats.reuse_gap_s),
        }


def _plain(histogram: Histogram) -> dict[str, Any]:
    return {"bounds": histogram.bounds, "counts": histogram.counts, "total": histogram.total}
