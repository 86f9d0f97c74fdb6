"""The door of drafts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from runtime.features.feature import Feature

if TYPE_CHECKING:
    from runtime.engine.core import EngineCore
    from runtime.features.drafts.part import Drafts

log = logging.getLogger("ramet.engine")


class DraftsFeature(Feature):
    """Likely next tokens from earlier text, verified in the same step as the known token."""

    counters: ClassVar[Mapping[str, tuple[str, str]]] = {
        "drafts": ("vllm:spec_decode_num_drafts", "Drafts that were verified"),
        "drafted_tokens": ("vllm:spec_decode_num_draft_tokens", "Tokens of drafts that were verified"),
        "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Tokens of drafts that were accepted"),
    }

    def parts(self, core: EngineCore) -> Iterable[Drafts]:
        """None if drafts are off, if steps overlap (tokens are known too late), or if not the next token is decided."""
        wanted = core.config.engine.drafts == "auto" and core.info.decoding is None and not core.overlap
        log.info("drafts from the tree are %s", "on, while they are measured to be faster" if wanted else "off")
        if not wanted:
            return
        from runtime.features.drafts.drafter import Drafter
        from runtime.features.drafts.part import Drafts

        yield Drafts(Drafter(core.cache.tree), core.scheduler.step_tokens)
