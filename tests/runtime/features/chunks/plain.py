"""Random schemas and prompts, and a plain reading of what the model should see."""

import random
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.tiny import VOCAB


@dataclass
class Module:
    """Tokens with a position each, and the indices of those that are placeholders."""

    name: str
    tokens: list[int]
    positions: list[int]
    holes: list[int] = field(default_factory=list)

    def asked(self) -> dict[str, Any]:
        """The entry in a message."""
        runs: list[list[int]] = []
        for i in self.holes:
            if runs and runs[-1][1] == i:
                runs[-1][1] = i + 1
            else:
                runs.append([i, i + 1])
        tokens = array("i", self.tokens).tobytes()
        return {"name": self.name, "tokens": tokens, "anchors": anchors_of(self.positions), "holes": runs}

    @property
    def kept(self) -> list[int]:
        return [i for i in range(len(self.tokens)) if i not in self.holes]


@dataclass
class Prompt:
    """The modules that a request reads, and its own tokens with a position each, in ascending order."""

    modules: list[Module]
    tokens: list[int]
    positions: list[int]

    def asked(self) -> dict[str, Any]:
        """The `reuse` fields of a message."""
        modules = [module.asked() for module in self.modules]
        return {"strategy": "chunks", "modules": modules, "anchors": anchors_of(self.positions)}

    @property
    def num_kept(self) -> int:
        return sum(len(module.kept) for module in self.modules)


def anchors_of(positions: list[int]) -> list[list[int]]:
    jumps = [i for i in range(len(positions)) if i == 0 or positions[i] != positions[i - 1] + 1]
    return [[i, positions[i]] for i in jumps]


class Reference:
    """transformers in float32 with explicit positions, and a mask of who sees whom."""

    def __init__(self, path: Path):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def logits(self, prompt: Prompt, output: list[int]) -> torch.Tensor:
        """float32 [1 + len(output), vocab]: after the prompt, and after each token of the output."""
        own = prompt.tokens + output
        last = prompt.positions[-1]
        tokens = [t for module in prompt.modules for t in module.tokens] + own
        positions = [p for module in prompt.modules for p in module.positions] + prompt.positions
        positions += range(last + 1, last + 1 + len(output))
        sees = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        at, behind = 0, len(tokens) - len(own)
        for module in prompt.modules:
            stop = at + len(module.tokens)
            sees[at:stop, at:stop] = torch.ones(stop - at, stop - at).tril().bool()
            sees[behind:, [at + i for i in module.kept]] = True
            at = stop
        sees[behind:, behind:] = torch.ones(len(own), len(own)).tril().bool()
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[None, None]
        found = self.model(torch.tensor([tokens]), attention_mask=mask, position_ids=torch.tensor([positions])).logits
        return found[0, len(tokens) - len(output) - 1 :]

    def best(self, prompt: Prompt, output: list[int]) -> list[int]:
        """The greedy token at each place of an output that stands there: equal to it if all of it is greedy."""
        return self.logits(prompt, output).argmax(-1)[:-1].tolist()


def draw_tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, VOCAB) for _ in range(count)]


@dataclass
class Schema:
    """Elements in order: a module, or the members of a union. `length`: the position behind the last one."""

    elements: list[list[Module]]
    length: int


def draw_schema(draw: random.Random, name: str) -> Schema:
    """Modules with gaps where a child would lie, with placeholders, and unions whose members share a start."""
    elements, at = [], draw.choice([0, 0, 3])
    for e in range(draw.randrange(1, 5)):
        members = [
            _draw_module(draw, f"/{name}/{e}.{m}", at) for m in range(draw.choice([1, 1, 2, 3]))
        ]  # fmt: skip
        elements.append(members)
        at = max(member.positions[-1] for member in members) + 1 + draw.choice([0, 0, 5])
    return Schema(elements, at)


def _draw_module(draw: random.Random, name: str, at: int) -> Module:
    length = draw.choice([1, 3, 16, 17, draw.randrange(1, 40)])
    gap = draw.randrange(length + 1) if draw.random() < 0.3 else length
    positions = [at + i + 7 * (i >= gap) for i in range(length)]
    holes: list[int] = []
    if draw.random() < 0.5 and length > 1:
        for _ in range(draw.randrange(1, 3)):
            start = draw.randrange(length)
            holes += range(start, min(start + draw.randrange(1, 6), length))
    holes = sorted(set(holes))[: length - 1]
    return Module(name, draw_tokens(draw, length), positions, holes)


def draw_prompt(draw: random.Random, schema: Schema) -> Prompt:
    """Some modules of a schema, one of each union; arguments in their holes, text in gaps, and text at the end."""
    modules = [draw.choice(members) for members in schema.elements if draw.random() < 0.8]
    placed: dict[int, int] = {}
    for module in modules:
        for i in module.holes:
            if draw.random() < 0.7:
                placed[module.positions[i]] = draw.randrange(3, VOCAB)
        if draw.random() < 0.3:
            placed.setdefault(module.positions[-1] + 1, draw.randrange(3, VOCAB))
    for i in range(draw.choice([1, 2, draw.randrange(1, 30)])):
        placed[schema.length + i] = draw.randrange(3, VOCAB)
    positions = sorted(placed)
    return Prompt(modules, [placed[p] for p in positions], positions)
