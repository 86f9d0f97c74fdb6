"""The door of next turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from runtime.features.feature import Feature

if TYPE_CHECKING:
    from runtime.engine.core import EngineCore
    from runtime.features.next_turn.next_turns import NextTurns


class NextTurnFeature(Feature):
    """The next turns of conversations, computed while the engine is idle."""

    counters: ClassVar[Mapping[str, tuple[str, str]]] = {
        "next_turn_tokens": ("ramet:next_turn_tokens", "Token rows computed while idle, for the next turns of chats"),
    }

    def parts(self, core: EngineCore) -> Iterable[NextTurns]:
        """None without a prefix cache, if no tokens may be computed, or if not the next token is decided."""
        most = core.config.scheduler.next_turn_tokens
        if not (most and core.cache.enabled and core.info.decoding is None):
            return
        from runtime.features.next_turn.next_turns import NextTurns

        yield NextTurns(core, most)
