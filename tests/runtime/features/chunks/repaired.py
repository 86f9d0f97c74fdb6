"""Prompts with modules that are repaired, as the reference of documents reads them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tests.runtime.features.chunks.plain import Module, Prompt, draw_tokens
from tests.runtime.features.chunks.reference import UNSCALED, Ask


@dataclass(frozen=True)
class Repaired(Ask):
    """A prompt with modules. Its rows are the kept rows of modules, and its own tokens, by position."""

    given: Prompt = field(default_factory=lambda: Prompt([], [], []))

    @cached_property
    def _modules(self) -> list[Module]:
        return [module for module in self.given.modules if module.kept]

    @cached_property
    def _rows(self) -> dict[int, int]:
        return {position: row for row, position in enumerate(self.positions)}

    @property
    def positions(self) -> Sequence[int]:
        of_modules = [module.positions[i] for module in self._modules for i in module.kept]
        return sorted([*of_modules, *self.given.positions])[: len(self.prompt)]

    @property
    def holes(self) -> list[tuple[int, int, int]]:
        modules = enumerate(self._modules)
        return [(number, m.positions[i], m.tokens[i]) for number, m in modules for i in m.holes]

    @property
    def chunks(self) -> Sequence[Sequence[int]]:
        return [[self._rows[module.positions[i]] for i in module.kept] for module in self._modules]

    @property
    def end(self) -> int:
        return max((chunk[-1] + 1 for chunk in self.chunks), default=0)

    def begins(self, number: int) -> bool:
        return [*self.chunks[number]] == [*range(len(self.chunks[number]))] and not self._modules[number].holes

    def asked(self) -> dict[str, Any]:
        """The `reuse` fields of a message."""
        repair = {"method": self.method, "granularity": self.granularity, "ratio": self.ratio, "k": self.k}
        return self.given.asked() | repair


def repaired(prompt: Prompt, **fields: Any) -> Repaired:
    """A prompt with modules and its repair. Own tokens at positions that modules have are left out."""
    tokens = {m.positions[i]: m.tokens[i] for m in prompt.modules for i in m.kept}
    own = {p: t for p, t in zip(prompt.positions, prompt.tokens, strict=True) if p not in tokens}
    prompt, tokens = Prompt(prompt.modules, [*own.values()], [*own]), tokens | own
    text = tuple(tokens[position] for position in sorted(tokens))
    if fields["method"] in UNSCALED:
        fields["ratio"] = None
    return Repaired(text, (), given=prompt, **fields)


def without_gaps(draw: random.Random) -> Prompt:
    """Modules at all positions from 0 on, with an argument in every hole; one lies within another."""
    tokens, hole, inner = draw_tokens(draw, 60), range(7, 11), range(20, 33)
    outer = [i for i in range(44) if i not in inner]
    modules = [
        Module("/a", [tokens[i] for i in outer], outer, [outer.index(i) for i in hole]),
        Module("/a/b", [tokens[i] for i in inner], [*inner]),
    ]
    own = [*hole, *range(44, 60)]
    return Prompt(modules, [draw_tokens(draw, 1)[0] if i in hole else tokens[i] for i in own], own)
