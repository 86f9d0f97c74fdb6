"""The door of hybrid models: those with recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.features.feature import Feature, Opening

if TYPE_CHECKING:
    from runtime.features.hybrid.strategy import HybridPrefix


class HybridFeature(Feature):
    """Prefixes of models with recurrent layers: a request resumes at a point whose state is stored."""

    def default(self, opening: Opening) -> HybridPrefix | None:
        executor = opening.executor
        if executor.states is None:
            return None
        from runtime.features.hybrid.strategy import HybridPrefix

        return HybridPrefix(opening.cache, executor.spec.num_layers, executor.states, opening.info.eos_token_ids)
