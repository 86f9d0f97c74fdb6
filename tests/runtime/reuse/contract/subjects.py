"""The subjects: prefix caching, ReasonCache, prompt modules, fusion by each way of choosing rows, diffusion, images."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM

from runtime.calls import GetPins, PinView, RemovePin
from runtime.engine.core import EngineCore
from runtime.features.diffusion.ask import DiffusionParams
from runtime.params import SamplingParams
from tests.runtime.engine.driver import call, greedy
from tests.runtime.execution.mixers.models import save_hybrid
from tests.runtime.features.chunks import plain as modules
from tests.runtime.features.chunks import reference as fusion
from tests.runtime.features.chunks.asks import Library, asked, build
from tests.runtime.features.chunks.plain import Module, Prompt, draw_tokens
from tests.runtime.features.chunks.reference import METHODS, UNSCALED, Ask
from tests.runtime.features.chunks.repaired import Repaired as RepairedAsk
from tests.runtime.features.chunks.repaired import repaired, without_gaps
from tests.runtime.features.diffusion.bicache.models import save_tiny
from tests.runtime.features.diffusion.bicache.reference import PlainModel, check_steps, llada
from tests.runtime.features.diffusion.plain_blocks import SURE, PlainBlocks
from tests.runtime.features.images.subject import Images
from tests.runtime.reuse.contract.subject import NEW, Subject, World

CLOSE = 2e-3  # of logits and their logarithms: float32, in another order
# Tokens, and fields of `DiffusionParams`.
Drawn = tuple[tuple[int, ...], dict[str, Any]]


@cache
def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def best(path: Path, prompt: list[int], output: list[int]) -> list[int]:
    """The greedy token at each place of an output: equal to the output if all of it is greedy."""
    logits = load(path)(torch.tensor([[*prompt, *output]]), logits_to_keep=1 + len(output)).logits[0]
    return logits[:-1].argmax(-1).tolist()


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
        assert world.tokens[rid] == best(self.path, prompt, world.tokens[rid]), rid

    def ordinary(self, prompt: list[int]) -> list[int]:
        return prompt


def check_pins(world: World, pins: list[PinView], prompt: Any, cached: int) -> None:
    """What is pinned outlives a flush and a flood, serves a prompt, and leaves nothing once it is let go."""
    draw = random.Random(0)
    world.flush()
    for i in range(12):
        world.ask(f"flood {i}", draw_tokens(draw, 60), by=Prefix(world.subject.path))
    world.run()
    world.one("pinned", prompt)
    world.check()
    assert world.cached("pinned") == cached
    assert {pin.id for pin in call(world.core, GetPins()).pins} == {pin.id for pin in pins}
    for pin in pins:
        assert call(world.core, RemovePin(pin.id))
    assert world.flush().live_tokens == 0


class Hybrid(Prefix):
    """A model with recurrent layers, whose turns end with token 2."""

    is_causal = False  # it is not served beside other strategies

    @classmethod
    def make(cls, fixture: Callable[[str], Any]) -> Subject:
        return cls(save_hybrid("Qwen3_5", fixture("tmp_path_factory").mktemp("hybrid")))

    def draw(self, draw: random.Random) -> list[int]:
        return draw.choices(range(3, 320), k=draw.choice([40, 63, 64, 90]))

    def anything(self, seed: int) -> list[int]:
        """One of three beginnings, some turns of it, and an end."""
        draw, root = random.Random(seed), random.Random(seed % 3)
        begin = [token for _ in range(4) for token in (*root.choices(range(3, 320), k=root.randrange(5, 30)), 2)]
        return [*begin[: draw.randrange(len(begin))], *draw.choices(range(2, 320), k=draw.randrange(1, 20))]


class Reasoning(Prefix):
    """Its answers are too short to share pages. What it compares is text."""

    @classmethod
    def make(cls, fixture: Callable[[str], Any]) -> Subject:
        return cls(fixture("tiny_dir"))

    def message(self, prompt: list[int], count: int) -> dict[str, Any]:
        return {"tokens": prompt, "reuse": {"strategy": "reasoncache"}}


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
    """A system prompt, two documents and a question; a subject for each way of choosing rows."""

    method: ClassVar[str]
    needs = 100

    def draw(self, draw: random.Random) -> fusion.Ask:
        texts = [draw_tokens(draw, draw.choice([20, 41])), draw_tokens(draw, draw.choice([16, 33]))]
        system, question = draw.choice([0, 5, 18]), draw.choice([1, 7])
        granularity = draw.choice(["page", "token"])
        fields = {"method": self.method, "granularity": granularity, "k": 3}
        return build(draw, texts, system, question, lead=draw.choice([(), (7, 8, 9)]), **fields)

    def message(self, prompt: fusion.Ask, count: int) -> dict[str, Any]:
        return {"tokens": prompt.prompt, "reuse": asked(prompt)}

    def anything(self, seed: int) -> fusion.Ask:
        """Documents of one of three libraries in any order, with any method and options."""
        library = Library(random.Random(seed % 3), 50)
        library.rewind(seed)
        return library.ask()

    def limit(self, draw: random.Random) -> tuple[fusion.Ask, list[int]]:
        """All rows computed again; or, for methods that compute none, a document that begins the prompt."""
        if self.method in UNSCALED:
            tokens = draw_tokens(draw, 61)
            prompt = fusion.Ask(tuple(tokens), ((0, 60),), self.method, None, chunk_tokens=64)
        else:
            prompt = replace(self.draw(draw), ratio=1.0)
        return prompt, greedy(load(self.path), prompt.prompt, NEW)

    def check(self, world: World, rid: str) -> None:
        """The rows are those that the reference chooses for this prompt, or for the one that it goes on with.

        The tokens are greedy and, where they were asked for, their log-probabilities right.
        """
        (_, ask), tokens, state = world.asked[rid], torch.tensor(world.tokens[rid]), world.requests[rid].lease
        reference, rows = load_fusion(self.path), state.selected.tolist()
        first = replace(ask, prompt=ask.prompt[: state.selected_for])
        known = [prompt for by, prompt in world.asked.values() if isinstance(by, Fusion)]
        assert any(_same(first, one) for one in known), (rid, state.selected_for)
        assert reference.accepts(first, world.core.cache.page_size, rows), (rid, ask, rows)
        logits = reference.logits(ask, rows, tokens.tolist(), len(first.prompt))[:-1]
        found = logits.gather(1, tokens[:, None])[:, 0]
        behind = logits.amax(1) - found
        assert behind.max() < CLOSE, (rid, ask, behind)
        if told := [one.logprob for event in world.events[rid] for one in event.logprobs or []]:
            off = (torch.tensor(told) - (found - logits.logsumexp(1))).abs().max()
            assert off < CLOSE, (rid, ask, off)

    def ordinary(self, prompt: fusion.Ask) -> list[int]:
        return list(prompt.prompt)


def _same(one: Ask, other: Ask) -> bool:
    """Whether two asks have the same prompt, and choose the same rows."""
    same = replace(one, given=other.given) if isinstance(one, RepairedAsk) and isinstance(other, RepairedAsk) else one
    return same == other and one.chunks == other.chunks


class Repaired(Fusion):
    """Modules as of `Modules`, repaired by any method."""

    def draw(self, draw: random.Random) -> Ask:
        method, granularity = draw.choice(["a3", "prophetkv", "legolink"]), draw.choice(["page", "token"])
        return repaired(Modules(self.path).draw(draw), method=method, granularity=granularity, ratio=0.3)

    def message(self, prompt: Ask, count: int) -> dict[str, Any]:
        return {"tokens": prompt.given.tokens, "reuse": prompt.asked()}

    def anything(self, seed: int) -> Ask:
        draw = random.Random(seed)
        return repaired(Modules(self.path).anything(seed), method=draw.choice(METHODS), ratio=draw.random(), k=3)

    def limit(self, draw: random.Random) -> tuple[Ask, list[int]]:
        """All rows computed again, and no position left out."""
        method = draw.choice(["a3", "cacheblend", "prophetkv", "legolink"])
        prompt = repaired(without_gaps(draw), method=method, ratio=1.0)
        return prompt, greedy(load(self.path), prompt.prompt, NEW)

    def size(self, prompt: Ask) -> int:
        return len(prompt.prompt)


class Diffusion(Subject):
    """A prompt is its tokens, and other fields of `DiffusionParams`."""

    is_causal = False
    refuses = False
    kind: ClassVar[str]
    least_page: ClassVar[int] = 1

    @classmethod
    def make(cls, fixture: Callable[[str], Any]) -> Subject:
        return cls(save_tiny(cls.kind, fixture("tmp_path_factory").mktemp(cls.kind) / cls.kind))

    def core(self, **options: Any) -> EngineCore:
        given = options | {"page_size": max(options.get("page_size", 16), self.least_page)}
        core = super().core(**given)
        self._info = core.info.decoding
        return core

    def draw(self, draw: random.Random) -> Drawn:
        return tuple(draw.choices(range(3, 290), k=draw.choice([40, 63, 64, 90]))), {}

    def fields(self, prompt: Drawn, count: int) -> dict[str, Any]:
        """Of `DiffusionParams`."""
        raise NotImplementedError

    def message(self, prompt: Drawn, count: int) -> dict[str, Any]:
        params = DiffusionParams(gen_length=count, **self.fields(prompt, count))
        filled = params.filled(self._info, SamplingParams(temperature=0))
        return {"tokens": prompt[0], "decoding": filled}

    def answer(self, prompt: Drawn, count: int) -> list[int]:
        """All tokens, computed without any cache."""
        raise NotImplementedError

    def limit(self, draw: random.Random) -> tuple[Drawn, list[int]]:
        prompt = self.draw(draw)
        return prompt, self.answer(prompt, NEW)

    def check(self, world: World, rid: str) -> None:
        (_, prompt), request = world.asked[rid], world.requests[rid]
        expected = self.answer(prompt, request.max_length - request.prompt_len)
        assert world.tokens[rid] == expected[: len(world.tokens[rid])], rid


class BiCache(Diffusion):
    """Reuse as by default, which is exact. A request has all its pages from the beginning, and cannot be cut."""

    kind = "llada"
    grows = False
    most_rows = 200

    def fields(self, prompt: Drawn, count: int) -> dict[str, Any]:
        same = {"prefix_tokens": len(prompt[0]) - 5, "steps": count, "block_length": count, "stream_canvas": True}
        return same | prompt[1]

    def anything(self, seed: int) -> Drawn:
        """One of three roots, some of it, and an end; declared or not, with and without guidance."""
        draw, root = random.Random(seed), random.Random(seed % 3).choices(range(3, 290), k=64)
        end = draw.choices(range(3, 290), k=draw.randrange(1, 9))
        declared = draw.choice([None, 32, 48, 64])
        more = {} if draw.random() < 0.7 else {"cfg_scale": 1.5}
        return (*root[: declared or 64], *end), {"prefix_tokens": declared, **more}

    def answer(self, prompt: Drawn, count: int) -> list[int]:
        return _denoise(self.path, prompt[0], count, prompt[1].get("cfg_scale", 0))

    def check(self, world: World, rid: str) -> None:
        """Tokens that are not the reference's come from masks that it could as well have decided first."""
        (_, (prompt, fields)), tokens, request = world.asked[rid], world.tokens[rid], world.requests[rid]
        expected = self.answer((prompt, fields), request.max_length - request.prompt_len)
        if tokens == expected[: len(tokens)]:
            return
        canvases = [event.shown for event in world.events[rid] if event.shown is not None]
        assert canvases[-1][: len(tokens)] == tokens, rid
        check_steps(_load_plain(self.path), list(prompt), canvases, CLOSE, fields.get("cfg_scale", 0))


class Blocks(Diffusion):
    kind = "sdar"
    least_page = 4

    def fields(self, prompt: Drawn, count: int) -> dict[str, Any]:
        return {"threshold": SURE}

    def anything(self, seed: int) -> Drawn:
        """One of three roots, some of it, and an end."""
        draw, root = random.Random(seed), random.Random(seed % 3).choices(range(3, 290), k=64)
        return (*root[: draw.randrange(65)], *draw.choices(range(3, 290), k=draw.randrange(1, 30))), {}

    def answer(self, prompt: Drawn, count: int) -> list[int]:
        return _denoise_blocks(self.path, prompt[0], count)


@cache
def _load_plain(path: Path) -> PlainModel:
    return PlainModel(path)


@cache
def _denoise(path: Path, prompt: tuple[int, ...], count: int, guidance: float) -> list[int]:
    return llada(_load_plain(path), list(prompt), count, count, count, cfg_scale=guidance)


@cache
def _load_blocks(path: Path) -> PlainBlocks:
    return PlainBlocks("sdar", path)


@cache
def _denoise_blocks(path: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    return _load_blocks(path).denoise(list(prompt), count, threshold=SURE)


def _fused(method: str) -> type[Fusion]:
    return type(f"Fusion_{method}", (Fusion,), {"method": method})


# Fusion: a dense look, a look at the question, rows chosen without a look, and no rows at all.
SUBJECTS: dict[str, type[Subject]] = {
    "prefix": Prefix,
    "hybrid": Hybrid,
    "reasoning": Reasoning,
    "modules": Modules,
    "repaired": Repaired,
    **{f"fusion-{method}": _fused(method) for method in ("a3", "prophetkv", "legolink", "full")},
    "bicache": BiCache,
    "blocks": Blocks,
    "images": Images,
}
