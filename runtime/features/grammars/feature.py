"""The door of grammars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from runtime.features.feature import Feature

if TYPE_CHECKING:
    from runtime.engine.core import EngineCore
    from runtime.features.grammars.checks import GrammarChecks
    from runtime.features.grammars.part import Grammars
    from runtime.frontend.preparer import ServedModel


class GrammarsFeature(Feature):
    """Outputs that follow a JSON schema, an expression or a grammar."""

    def parts(self, core: EngineCore) -> Iterable[Grammars]:
        from runtime.features.grammars.part import Grammars

        yield Grammars(core)

    @staticmethod
    def preparer(served: ServedModel) -> GrammarChecks:
        from runtime.features.grammars.checks import GrammarChecks

        return GrammarChecks()
