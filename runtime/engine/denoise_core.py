"""DiffusionCore: the engine core of diffusion models. Requests encode their shared prefix, then denoise a canvas."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.batch import ForwardBatch
from runtime.config import Config
from runtime.diffusion.canvas import Denoiser
from runtime.engine.core import EngineCore
from runtime.engine.denoise_request import DenoiseRequest, DenoiseWork
from runtime.engine.denoise_scheduler import DenoiseScheduler
from runtime.engine.in_flight import Flight
from runtime.errors import RametError
from runtime.params import DiffusionParams, SamplingParams
from runtime.protocol import AddPin, AddRequest, DiffusionInfo, Finish, Inbound, Outbound, TokenEvent
from runtime.request import Request
from runtime.reuse.bicache.boundary_states import BoundaryStore
from runtime.reuse.bicache.depth_table import NO_TABLE, choose_table
from runtime.reuse.bicache.encodings import Encodings
from runtime.reuse.bicache.plan import plan_denoise
from runtime.sampling.sampled import BadLogits

log = logging.getLogger("ramet.engine")

# The paper's R.
_INTERVAL = 16


class DiffusionCore(EngineCore):
    """The engine of a diffusion model, without its surroundings."""

    scheduler: DenoiseScheduler  # type: ignore[assignment]
    requests: dict[str, DenoiseRequest]  # type: ignore[assignment]

    def __init__(self, config: Config, path: Path, quotas: Mapping[str, int] | None = None):
        """Load the model directory `path`; `quotas`: cached pages by tenant. Raises ModelError."""
        super().__init__(config, path, quotas)
        self.overlap = False
        spec = self.executor.spec
        assert spec.diffusion is not None
        self.diffusion = spec.diffusion
        self.table = choose_table(config.diffusion.depth_table, path, spec)
        self.encodings = Encodings(self.cache)
        self.boundaries = BoundaryStore(int(config.diffusion.boundary_memory * 2**30))
        self.scheduler = DenoiseScheduler(
            config.scheduler, self.encodings, self.table, self.boundaries, spec.num_layers, self.executor.step_tokens
        )
        self.info.diffusion = DiffusionInfo(
            self.diffusion.mask_token_id,
            self.diffusion.algorithm,
            spec.num_layers,
            self.table.version,
            self._default_interval(DiffusionParams()),
        )
        counted = ("encoded_prefixes", "partial_matches", "denoise_steps", "refreshes", "row_layers")
        self.counters |= dict.fromkeys(counted, 0)

    def handle(self, message: Inbound) -> Outbound | None:
        """Take a message; what is to be answered at once, if anything."""
        if isinstance(message, AddPin):
            tokens = array("i")
            tokens.frombytes(message.tokens)
            whole = tokens[: len(tokens) // self.info.page_size * self.info.page_size].tobytes()
            message.namespace = Encodings.namespace(message.namespace, whole)
        return super().handle(message)

    def add(self, message: AddRequest) -> None:
        """Accept a request; the front end has checked that it can be served and that its id is new."""
        tokens = array("i")
        tokens.frombytes(message.tokens)
        sampling = SamplingParams.model_construct(**message.sampling)
        params = DiffusionParams.model_construct(**(message.diffusion or {}))
        if params.reuse is None:
            params.reuse = self.config.diffusion.bicache
        if params.partial is None:
            # A declared prefix is meant to be encoded.
            params.partial = self.config.diffusion.partial_matches and params.prefix_tokens is None
        eos = () if sampling.ignore_eos else self.info.eos_token_ids
        self._sequence += 1
        generator = torch.Generator(self.executor.device)
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)
        denoiser = Denoiser(np.array(tokens, dtype=np.int64), params, sampling, self.diffusion, generator)
        request = DenoiseRequest(
            rid=message.rid,
            tokens=tokens,
            prompt_len=len(tokens),
            sampling=sampling,
            stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
            max_tokens=len(denoiser.tokens),
            namespace=message.namespace,
            priority=message.priority,
            sequence=self._sequence,
            arrival_s=time.monotonic(),
            denoiser=denoiser,
            params=params,
            interval=params.refresh_interval or self._default_interval(params),
        )
        self.requests[request.rid] = request
        self.scheduler.add(request)
        self.counters["requests"] += 1
        self.counters["prompt_tokens"] += request.prompt_len

    def _default_interval(self, params: DiffusionParams) -> int:
        """Without a table nothing is known that approximation could rest on: depth 1, always refreshed, is exact."""
        is_exact = self.table is NO_TABLE and params.depth is None
        return self.config.diffusion.refresh_interval or (1 if is_exact else self.table.interval or _INTERVAL)

    def flush(self, pins: bool = False) -> dict[str, Any]:
        """Drop every cached page that no live request uses, and what belongs to them."""
        self.boundaries.clear()
        return super().flush(pins)

    def _plan(self, work: list[DenoiseWork]) -> ForwardBatch:  # type: ignore[override]
        spec = self.executor.spec
        return plan_denoise(work, spec.num_layers, spec.hidden_size, self.info.page_size, self.executor.device)

    def _choose(self, work: list[DenoiseWork], logits: torch.Tensor) -> tuple[list[Request], None]:  # type: ignore[override]
        """Nothing: what a canvas becomes is decided when the step is booked."""
        return [], None

    def _book(self, flight: Flight, tokens: Mapping[Request, int | RametError]) -> list[TokenEvent | None]:
        batch, logits, work = flight.batch, flight.logits, flight.work
        row_s = (time.monotonic() - flight.started) / len(batch.tokens)
        self.counters["row_layers"] += sum(
            len(group.layers) * len(batch.tokens if group.rows is None else group.rows) for group in batch.groups
        )
        return [self._advance_canvas(item, logits, row_s) for item in work]  # type: ignore[arg-type]

    def _advance_canvas(self, item: DenoiseWork, logits: torch.Tensor, row_s: float) -> TokenEvent | None:
        """Book one piece of computed work; `row_s` is what each of the step's rows took."""
        request = item.request
        if item.boundary is not None:
            request.boundary = self._keep_boundary(request, item.boundary)
        if request.is_encoding:
            similarity = self.table.similarity_at(request.prefix_ratio)
            self.encodings.insert(request, self.table.version, similarity, row_s * item.num_rows)
            self.counters["encoded_prefixes"] += 1
            self.counters["prefill_tokens"] += item.num_rows
            self.scheduler.waiting.computed(request)
            return None
        if item.refresh:
            request.refreshed_at = request.num_steps
            request.refreshes += 1
            self.counters["refreshes"] += 1
        self.counters["partial_matches"] += request.is_partial and not request.num_steps
        request.num_steps += 1
        self.counters["denoise_steps"] += 1
        wanted = logits[item.logits]
        if item.unprompted_rows:
            unprompted = logits[item.unprompted_logits]
            wanted = unprompted + (request.params.cfg_scale + 1) * (wanted - unprompted)
        error = self._decide(request, wanted)
        if error is None:
            return self._report(request)
        event = self._fail(request, error)
        if isinstance(error, BadLogits):
            self.counters["bad_logits"] += 1
            # What it shared may be where they come from: the next request shall not find it.
            self.encodings.forget(request)
            self.boundaries.discard(request.encoding)
        return event

    def _decide(self, request: DenoiseRequest, logits: torch.Tensor) -> RametError | None:
        """Let a request decide some positions; what stood in the way of that, which concerns it alone."""
        try:
            request.denoiser.commit(logits)
        except BadLogits as error:
            return error
        except Exception as error:
            log.exception("no token could be chosen for request %s", request.rid)
            return RametError(f"no token could be chosen: {type(error).__name__}")
        return None

    def _keep_boundary(self, request: DenoiseRequest, states: torch.Tensor) -> torch.Tensor | None:
        """For other requests, and for this one's next refresh; not at all where there is no memory for it."""
        if not self.boundaries.max_bytes:
            return None
        self.boundaries.put(request.encoding, request.depth, states)
        return states

    def _report(self, request: DenoiseRequest) -> TokenEvent | None:
        """What became certain at this step: the positions up to the first mask, or up to the first stop token.

        Committed tokens never change, so nothing behind a stop token that is followed from the prompt on without a
        gap can change the answer: the request ends there.
        """
        output = request.denoiser.tokens[request.prompt_len : request.prompt_len + request.denoiser.num_decided]
        new = output[request.num_sent :].tolist()
        stop = next((i for i, token in enumerate(new) if token in request.stop_ids), None)
        finish = None
        if stop is not None:
            new, finish = new[: stop + 1], Finish("stop", matched=new[stop])
        elif request.denoiser.done:
            finish = Finish("length")
        canvas = request.denoiser.tokens[request.prompt_len :].tolist() if request.params.stream_canvas else None
        if not new and finish is None and canvas is None:
            return None
        request.num_sent += len(new)
        self.counters["generation_tokens"] += len(new)
        if new:
            request.first_token_s = request.first_token_s or time.monotonic()
        event = TokenEvent(request.rid, new, finish, cached_tokens=request.cached_tokens, canvas=canvas)
        event.queue_s = request.admitted_s - request.arrival_s
        event.prefill_s = max(request.first_token_s - request.admitted_s, 0.0)
        event.reuse = request.report()
        if finish is not None:
            self._end(request, finish)
        return event
