"""Operators' pins, whose missing KV is computed first, and the prefixes that requests keep."""

from __future__ import annotations

from array import array
from collections.abc import Generator
from contextlib import ExitStack
from itertools import count

import msgspec

from radix import Namespace
from radix.node import TOKEN_BYTES, has_names, num_unpadded
from runtime.calls import AddPin, AllPins, Answers, GetPins, KeptPrefixes, PinView, RemovePin
from runtime.engine.core import EngineCore
from runtime.engine.part import Part
from runtime.errors import InvalidRequest, PinRefused
from runtime.params import SamplingParams
from runtime.protocol import AddRequest, Breakpoint, CacheUsage, Finish
from runtime.request import Request


class Pins(Part):
    """Pins prefixes and entries, and keeps the prefixes of requests with breakpoints."""

    def __init__(self, core: EngineCore):
        self._core, self._cache = core, core.cache
        self._serial = count(1)
        # Ids of the requests that compute missing KV for a pin, and how each ended; None: it still runs.
        self._computing: dict[str, Finish | None] = {}
        self._keeping: dict[Request, list[Breakpoint]] = {}

    def answers(self) -> Answers:
        return (
            AddPin.by(self.pin),
            RemovePin.by(lambda call: self._cache.pins.unpin(call.pin)),
            GetPins.by(self._show),
        )

    def _show(self, _: GetPins) -> AllPins:
        board, holds, page_size = self._cache.pins, self._cache.holds, self._cache.page_size
        self._cache.expire()
        return AllPins(
            pins=[board.view(pin) for pin in board.pins.values()],
            kept=[
                KeptPrefixes(tenant=owner.tenant, prefixes=ends, tokens=pages * page_size)
                for owner, ends, pages in holds.sums()
            ],
            pinned_tokens=(self._cache.tree.num_pinned_pages + holds.num_kept_pages) * page_size,
            budget_tokens=holds.budget_pages * page_size,
        )

    # -- operators -------------------------------------------------------------------------------------------

    def pin(self, call: AddPin) -> Generator[None, None, list[PinView]]:
        """Pin the whole pages of a prefix, or entries; missing KV is computed first.

        Raises:
            InvalidRequest: if the prefix fills no page.
            PinRefused: if the pin exceeds the budget, or its KV cannot be computed and kept.
        """
        if call.ask is None:
            page_bytes = self._cache.page_size * TOKEN_BYTES
            call = msgspec.structs.replace(call, tokens=call.tokens[: len(call.tokens) // page_bytes * page_bytes])
            if not call.tokens:
                size = self._cache.page_size
                raise InvalidRequest(f"the prefix is shorter than a page of {size} tokens; pins hold whole pages")
        pinned = self._pin(call)
        if pinned is None:
            if not self._cache.enabled:
                raise PinRefused("the prefix cache is off")
            yield from self._compute(call)
            pinned = self._pin(call)
        if pinned is None:
            why = "too much is running, or the tenant's quota is smaller than the prefix"
            raise PinRefused(f"the prefix was evicted as soon as it was computed: {why}")
        return pinned

    def _compute(self, call: AddPin) -> Generator[None, None, None]:
        """Add a request that computes the missing KV. Front ends ignore its events, since its id is unknown to them."""
        if call.ask is None and has_names(call.tokens):
            raise PinRefused("the prefix has images, which only a request with them can compute")
        rid = f"(pin {next(self._serial)})"
        sampling = SamplingParams(max_new_tokens=0, temperature=0)
        message = AddRequest(rid, call.tokens, sampling, namespace=call.namespace, account=call.account, ask=call.ask)
        refused = self._core.add(message)
        self._computing[rid] = refused[0].finish if refused else None
        try:
            while (finish := self._computing[rid]) is None:
                yield
        finally:
            if self._computing.pop(rid) is None:
                self._core.abort(rid)
        if finish.type in ("error", "abort"):
            raise PinRefused(finish.message or "the prefix could not be computed")

    def _pin(self, call: AddPin) -> list[PinView] | None:
        """Pin the prefix or all entries of a call; None, with nothing pinned, if some of the KV is missing.

        Raises PinRefused, with nothing pinned.
        """
        board = self._cache.pins
        try:
            runs = self._core.strategies.serving(call.ask).runs(array("i", call.tokens), call.namespace, call.ask)
        except InvalidRequest as error:
            raise PinRefused(error.message) from None
        pins: list[PinView] = []
        with ExitStack() as undo:
            for run in runs:
                if (pin := board.pin(run.tokens, run.namespace, call.name or run.name, call.ttl_s)) is None:
                    return None
                undo.callback(board.unpin, pin.id)
                pins.append(pin)
            undo.pop_all()
        return pins

    # -- requests --------------------------------------------------------------------------------------------

    def added(self, request: Request) -> None:
        if given := request.message.breakpoints:
            self._keeping[request] = [Breakpoint(end, ttl_s) for end, ttl_s in sorted(given)]

    def prefilled(self, request: Request) -> None:
        """Keep the prefixes of a request's breakpoints, once its prompt is computed."""
        is_whole = not request.strategy.keeps_prompts or request.sequence.num_computed >= request.prompt_len
        if request in self._keeping and is_whole:
            self._keep(request, self._keeping.pop(request))

    def _keep(self, request: Request, breakpoints: list[Breakpoint]) -> None:
        cache = self._cache
        for one in breakpoints:
            if not cache.enabled:
                one.reason = "the prefix cache is off"
            elif not request.strategy.keeps_prompts:
                one.reason = f"what a prompt computes with {request.strategy.name} is no prefix of other prompts"
            else:
                (run,) = request.strategy.runs(request.tokens[: one.tokens], request.namespace)
                whole = run.tokens[: len(run.tokens) // cache.page_size * cache.page_size]
                one.reason = self._hold(whole, request.namespace, one.ttl_s)
                if one.reason is None:
                    one.kept = num_unpadded(whole)
        request.event.usage = usage_of(request.num_prompt, max(request.cached_tokens, 0), breakpoints)

    def _hold(self, whole: array[int], namespace: Namespace, ttl_s: float) -> str | None:
        """Hold the pages of a prefix until `ttl_s` after their last use; returns why they are not held, None if so."""
        cache = self._cache
        match = cache.tree.match(whole.tobytes(), namespace)
        if not whole:
            why: str | None = f"it is shorter than a page of {cache.page_size} tokens"
        elif len(match.pages) * cache.page_size < len(whole):
            why = "it is not in the cache"
        elif cache.holds.keep(match, ttl_s):
            why = None
        else:
            budget = f"the budget is {cache.holds.budget_pages} pages of {cache.page_size} tokens"
            why = f"it exceeds what pins and the equal shares of other tenants leave: {budget}"
        cache.holds.num_refused += why is not None
        return why

    def ended(self, request: Request, finish: Finish) -> None:
        self._keeping.pop(request, None)
        if request.rid in self._computing:
            self._computing[request.rid] = finish


def usage_of(prompt: int, read: int, breakpoints: list[Breakpoint]) -> CacheUsage:
    """The usage of a prompt of `prompt` tokens, of which `read` came from the cache."""
    created: dict[float, int] = {}
    done = read
    for one in sorted(breakpoints, key=lambda one: one.kept):
        if one.kept > done:
            ttl_s = max(other.ttl_s for other in breakpoints if other.kept >= one.kept)
            created[ttl_s] = created.get(ttl_s, 0) + one.kept - done
            done = one.kept
    return CacheUsage(read, created, prompt - done, breakpoints)
