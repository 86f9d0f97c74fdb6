"""The subjects: prefix caching, ReasonCache, prompt modules, and each method of fusion."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM

from tests.runtime.engine.driver import greedy
from tests.runtime.reuse.contract.subject import NEW, Subject, World
from tests.runtime.reuse.fusion import reference as fusion
from tests.runtime.reuse.fusion.driver import CLOSE, Library, asked, build
from tests.runtime.reuse.modules import plain as modules
from tests.runtime.reuse.modules.plain import Module, Prompt, draw_tokens


@cache
def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@cache
def load_modules(path: Path) -> modules.Reference:
    return modules.Reference(path)


@cache
def load_fusion(path: Path) -> fusion.Reference:
    return fusion.Reference(path)


class Prefix(Subject):
    """A prompt is its tokens."""

    refuses = False

    def draw(self, draw: random.Random) -> list[int]:
        return draw_tokens(draw, draw.choice([40, 63, 64, 90]))

    def message(self, prompt: list[int], count: int) -> dict[str, Any]:
        return {"tokens": prompt}

    def limit(self, draw: random.Random) -> tuple[list[int], list[int]]:
        prompt = self.draw(draw)
        return prompt, greedy(load(self.path), prompt, NEW)

    def check(self, world: World, rid: str) -> None:
        _, prompt = world.asked[rid]
        assert world.tokens[rid] == greedy(load(self.path), prompt, len(world.tokens[rid])), rid

    def ordinary(self, prompt: list[int]) -> list[int]:
        return prompt


class Reasoning(Prefix):
    """Its answers are too short to share pages."""

    def message(self, prompt: list[int], count: int) -> dict[str, Any]:
        return {"tokens": prompt, "reuse": {"method": "reasoncache"}}


class Modules(Subject):
    """Two modules, one with placeholders, an argument and text behind them."""

    def draw(self, draw: random.Random) -> Prompt:
        first, second = draw.choice([16, 23]), draw.choice([20, 33])
        at = first + draw.choice([0, 5])
        some = [
            Module("/a", draw_tokens(draw, first), [*range(first)]),
            Module("/b", draw_tokens(draw, second), [*range(at, at + second)], [3, 4, 9]),
        ]
        positions = [at + 3, *range(at + second, at + second + draw.choice([3, 20]))]
        return Prompt(some[:: draw.choice([1, -1])], draw_tokens(draw, len(positions)), positions)

    def message(self, prompt: Prompt, count: int) -> dict[str, Any]:
        return {"tokens": prompt.tokens, "reuse": prompt.asked()}

    def anything(self, seed: int) -> Prompt:
        """Modules of one of three schemas, with gaps, placeholders and unions; arguments, text between, and text."""
        schema = modules.draw_schema(random.Random(seed % 3), f"{seed % 3}")
        return modules.draw_prompt(random.Random(seed), schema)

    def limit(self, draw: random.Random) -> tuple[Prompt, list[int]]:
        """One module at 0 is a prefix."""
        tokens = draw_tokens(draw, 60)
        prompt = Prompt([Module("/a", tokens[:50], [*range(50)])], tokens[50:], [*range(50, 60)])
        return prompt, greedy(load(self.path), tokens, NEW)

    def check(self, world: World, rid: str) -> None:
        _, prompt = world.asked[rid]
        assert world.tokens[rid] == load_modules(self.path).best(prompt, world.tokens[rid]), rid

    def size(self, prompt: Prompt) -> int:
        return prompt.num_kept + len(prompt.tokens)

    def ordinary(self, prompt: Prompt) -> list[int]:
        return [token for module in prompt.modules for token in module.tokens] + prompt.tokens


class Fusion(Subject):
    """A system prompt, two documents and a question; a subject for each method."""

    method: ClassVar[str]
    needs = 100

    def draw(self, draw: random.Random) -> fusion.Ask:
        texts = [draw_tokens(draw, draw.choice([20, 41])), draw_tokens(draw, draw.choice([16, 33]))]
        system, question = draw.choice([0, 5, 18]), draw.choice([1, 7])
        granularity = draw.choice(["page", "token"])
        return build(draw, texts, system, question, method=self.method, granularity=granularity, k=3)

    def message(self, prompt: fusion.Ask, count: int) -> dict[str, Any]:
        return {"tokens": prompt.prompt, "reuse": asked(prompt)}

    def anything(self, seed: int) -> fusion.Ask:
        """Documents of one of three libraries in any order, with any options."""
        library = Library(random.Random(seed % 3), 50)
        library.rewind(seed)
        return library.ask(method=self.method)

    def limit(self, draw: random.Random) -> tuple[fusion.Ask, list[int]]:
        """All rows computed again; or, for methods that compute none, a document that begins the prompt."""
        if self.method in ("pie", "full"):
            tokens = draw_tokens(draw, 61)
            prompt = fusion.Ask(tuple(tokens), ((0, 60),), self.method, None, chunk_tokens=64)
        else:
            prompt = replace(self.draw(draw), ratio=1.0)
        return prompt, greedy(load(self.path), prompt.prompt, NEW)

    def check(self, world: World, rid: str) -> None:
        """The chosen rows are the reference's, and so is the answer."""
        (_, ask), tokens, state = world.asked[rid], world.tokens[rid], world.requests[rid].reuse
        reference, rows = load_fusion(self.path), state.selected.tolist()
        first = replace(ask, prompt=ask.prompt[: state.selected_for])
        assert reference.accepts(first, world.core.cache.page_size, rows), (rid, ask, rows)
        logits = reference.logits(ask, rows, tokens, len(first.prompt))[:-1]
        behind = logits.amax(1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert behind.max() < CLOSE, (rid, ask, behind)

    def ordinary(self, prompt: fusion.Ask) -> list[int]:
        return list(prompt.prompt)


def _fused(method: str) -> type[Fusion]:
    return type(f"Fusion_{method}", (Fusion,), {"method": method})


SUBJECTS: dict[str, type[Subject]] = {
    "prefix": Prefix,
    "reasoning": Reasoning,
    "modules": Modules,
    **{f"fusion-{method}": _fused(method) for method in fusion.METHODS},
}
