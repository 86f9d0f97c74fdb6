"""Grammars in the engine: requests wait until theirs is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from radix import Namespace
from runtime.engine.core import EngineCore
from runtime.engine.part import Part
from runtime.errors import RametError
from runtime.features.grammars.compiler import GrammarCompiler
from runtime.models.tokenizer import Tokenizer
from runtime.protocol import Finish, TokenEvent
from runtime.request import Request


class _AnyText:
    """The grammar of an output that may be any text."""

    complete = may_refuse = False

    def allowed(self) -> np.ndarray | None:
        return None

    def accept(self, token: int) -> bool:
        return True


class Grammars(Part):
    """Compiles requests' grammars in threads; the requests wait for them."""

    def __init__(self, core: EngineCore):
        self._core = core
        info = core.info
        # The model's tokenizer is loaded for the first grammar.
        self.compiler = GrammarCompiler(
            lambda: Tokenizer.load(Path(info.path)).to_json(), info.vocab_size, info.eos_token_ids
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
            # Where a lazy grammar fails to compile, the model generates without it: its calls may still be right.
            request.sampler.grammar = _AnyText() if isinstance(grammar, RametError) else grammar
            self._core.scheduler.wake(rid)
        return failed

    def erase(self, tenant: str) -> None:
        self.compiler.erase(Namespace(tenant))

    def ended(self, request: Request, finish: Finish) -> None:
        if request.sampler.params.constrained:
            self.compiler.cancel(request.rid)
