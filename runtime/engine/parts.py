"""Small parts of the engine: grammars, drafts, KV events."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from radix import Namespace
from runtime.calls import Call, EraseTenant
from runtime.engine.core import EngineCore
from runtime.engine.part import Answer, Handler, Part
from runtime.engine.tiering import Tiering
from runtime.errors import RametError
from runtime.kv.publisher import EventPublisher
from runtime.models.tokenizer import Tokenizer
from runtime.protocol import Finish, TokenEvent
from runtime.request import Request, Work
from runtime.sampling.drafts.drafter import Drafter
from runtime.sampling.grammar import AnyText, GrammarCompiler

log = logging.getLogger("ramet.engine")

# An idle engine with tiers wakes this often to publish what they have written and dropped.
_IDLE_WITH_TIERS_S = 0.2


class Grammars(Part):
    """Compiles requests' grammars in threads; the requests wait for them."""

    def __init__(self, core: EngineCore, path: Path):
        """`path`: directory of the model, whose tokenizer is loaded for the first grammar."""
        self._core = core
        info = core.info
        self.compiler = GrammarCompiler(
            lambda: Tokenizer.load(path).to_json(), info.vocab_size, list(info.eos_token_ids)
        )

    def blocked_on(self, request: Request) -> str | None:
        state = request.sampler
        if not state.params.constrained or state.grammar is not None:
            return None
        self.compiler.start(request.rid, state.params, request.owner)
        return request.rid

    def poll(self, step_s: float) -> Sequence[TokenEvent]:
        failed = []
        for rid, grammar in self.compiler.take():
            request = self._core.requests[rid]
            if isinstance(grammar, RametError) and request.sampler.params.lazy is None:
                failed.append(self._core.fail(request, grammar))
                continue
            # A lazy grammar is a help for small models: the text before a call needs none, and the call may be right.
            request.sampler.grammar = AnyText() if isinstance(grammar, RametError) else grammar
            self._core.scheduler.wake(rid)
        return failed

    def answers(self) -> Mapping[type[Call], Handler]:
        return {EraseTenant: self._erase}

    def _erase(self, call: EraseTenant) -> Answer:
        self.compiler.erase(Namespace(call.tenant))
        return {}

    def ended(self, request: Request, finish: Finish) -> None:
        if request.sampler.params.constrained:
            self.compiler.cancel(request.rid)


class Drafts(Part):
    """Adds drafts to the work of decoding requests, which verify them."""

    def __init__(self, drafter: Drafter, step_tokens: int):
        self.drafter = drafter
        self._step_tokens = step_tokens

    @staticmethod
    def open(core: EngineCore) -> Drafts | None:
        """None if drafts are off, if steps overlap (tokens are not known in time), or for a diffusion model."""
        wanted = core.config.engine.drafts == "auto" and core.info.diffusion is None and not core.overlap
        log.info("drafts from the tree are %s", "on, while they are measured to be faster" if wanted else "off")
        return Drafts(Drafter(core.cache.tree), core.scheduler.step_tokens) if wanted else None

    def scheduled(self, work: list[Work]) -> None:
        self.drafter.extend(work, self._step_tokens)

    def booked(self, work: Sequence[Work], num_rows: int, seconds: float) -> None:
        self.drafter.note_step(work, seconds)

    def ended(self, request: Request, finish: Finish) -> None:
        if finish.type != "error" and request.message.store:
            self.drafter.ended(request)

    def flush(self) -> None:
        self.drafter.clear()


class KVEvents(Part):
    """Publishes events of KV that enters or leaves the cache and its tiers."""

    def __init__(self, publisher: EventPublisher, events: Any, tiering: Tiering | None):
        self.publisher = publisher
        self._events, self._tiering = events, tiering
        self.idle_s = None if tiering is None else _IDLE_WITH_TIERS_S

    @staticmethod
    def open(core: EngineCore, tiering: Tiering | None) -> KVEvents | None:
        if core.cache.events is None:
            return None
        return KVEvents(EventPublisher(core.config.cache), core.cache.events, tiering)

    def settle(self) -> None:
        self.publisher.publish(self._events.take())
        if self._tiering is not None:
            for tier, events in self._tiering.tiers.worker.ledger.take().items():
                self.publisher.publish(events, tier)

    def answers(self) -> Mapping[type[Call], Handler]:
        return {EraseTenant: self._erase}

    def _erase(self, call: EraseTenant) -> Answer:
        self.publisher.erase(call.tenant)
        return {}

    def close(self) -> None:
        self.publisher.close()
