"""`ramet profile --fusion`: the table from which `"reuse": {"method": "auto"}` picks a method for a model."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator
from tqdm import tqdm

from loadgen.accuracy.bench_quality import FULL
from loadgen.accuracy.documents import ways_of
from loadgen.accuracy.forced import Asker
from loadgen.http.prose import Prose
from loadgen.micro.documents import METHODS, row_share, ways
from loadgen.micro.intervals import interval
from runtime.config import Config
from runtime.errors import ModelError
from runtime.models.resolve import resolve_model
from runtime.models.spec import LlamaSpec
from runtime.models.tokenizer import Tokenizer
from runtime.params import ReuseParams
from runtime.reuse.fusion.prompt import TokenizedPrompt

_DOCUMENTS, _QUOTED, _ANSWER = 4, 16, 12
# Prompts that run together.
_BATCH = 2


class FusionSettings(BaseModel):
    """Options of `ramet profile --fusion`, which the table records."""

    model_config = ConfigDict(extra="forbid")

    ratios: list[int] = Field([5, 15, 30, 50])
    samples: int = Field(24, ge=1, le=100_000)
    length: int = Field(1024, ge=_DOCUMENTS * (_QUOTED + _ANSWER))
    seed: int = 0

    @field_validator("ratios", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("ratios")
    @classmethod
    def _check(cls, value: list[int]) -> list[int]:
        if not value or not all(1 <= ratio <= 99 for ratio in value):
            raise ValueError("ratios are percentages of 1 to 99")
        return sorted(set(value))


class Source:
    """Prompts with documents of the texts that come with Ramet, and a quotation from one, which the answer goes on."""

    def __init__(self, tokenizer: Tokenizer, settings: FusionSettings):
        self._tokenizer, self._settings, self._prose = tokenizer, settings, Prose(random.Random(0))
        self._head, self._lead = self._encode("Some texts follow.\n\n"), self._encode("\n\nOne of the texts says: ")

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def sample(self, number: int) -> tuple[TokenizedPrompt, list[int]]:
        """A prompt and the answer's tokens."""
        rng, length = random.Random(f"{self._settings.seed} {number}"), self._settings.length // _DOCUMENTS
        tokens, ranges, documents = array("i", [*self._tokenizer.leading_ids, *self._head]), [], []
        for _ in range(_DOCUMENTS):
            documents.append(self._text(rng, length))
            ranges.append((len(tokens), len(tokens) + length))
            tokens.extend(documents[-1])
        one = rng.choice(documents)
        at = rng.randrange(length - _QUOTED - _ANSWER + 1)
        tokens.extend([*self._lead, *one[at : at + _QUOTED]])
        answer = one[at + _QUOTED : at + _QUOTED + _ANSWER]
        return TokenizedPrompt(tokens, ranges, [f"{i}" for i in range(_DOCUMENTS)]), answer

    def _text(self, rng: random.Random, length: int) -> list[int]:
        """Exactly so many tokens of prose."""
        found: list[int] = []
        while len(found) < length:
            found += self._encode(self._prose.reseeded(rng.random()).text(length) + "\n")
        return found[:length]


def profile_fusion(config: Config, settings: FusionSettings, out: Path) -> int:
    """Measure a model, write the table, print it. Raises ModelError."""
    path = resolve_model(config.model)
    spec = LlamaSpec.load(path)
    context_length = config.model.context_length or spec.context_length
    if spec.diffusion is not None:
        raise ModelError(f"{spec.architecture} is a diffusion model, which serves no documents")
    if settings.length + 128 > context_length:
        raise ModelError(f"--length is {settings.length}; prompts of 128 more do not fit into {context_length}")
    grid = ways(
        [method for method in METHODS if method != "random"], [ratio / 100 for ratio in settings.ratios], ["page"]
    )
    asker = Asker(path, **config.model.model_dump(exclude={"model"}))
    found = _measure(asker, Source(Tokenizer.load(path), settings), settings, grid)
    asker.close()
    rows = [_row(asked, *found[name]) for name, asked in grid.items()]
    table = {"model": spec.identity, "settings": settings.model_dump(), "measured": rows}
    out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"{'method':16}  KL, nats [95 %]           rows of full prefill")
    for name, (kls, costs) in found.items():
        low, high = interval(np.array(kls), np.random.default_rng(0))
        print(f"{name:16}  {np.mean(kls):.4f} [{low:.4f}, {high:.4f}]  {np.mean(costs):.3f}")
    return 0


def _measure(
    asker: Asker, source: Source, settings: FusionSettings, grid: dict[str, ReuseParams]
) -> dict[str, tuple[list[float], list[float]]]:
    """By way: mean KL of each answer, and rows x layers of its prompt as a share of full prefill's."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in grid}
    page_size, num_layers = asker.core.info.page_size, asker.core.executor.spec.num_layers
    numbers = range(settings.samples)
    for first in tqdm(range(0, settings.samples, _BATCH), desc="divergence", unit="batch"):
        drawn = [source.sample(number) for number in numbers[first : first + _BATCH]]
        asked = [(prompt, answer, name, ask) for prompt, answer in drawn for name, ask in ways_of(prompt, grid).items()]
        logprobs = asker.forced([ask for *_, ask in asked], [answer for _, answer, _, _ in asked])
        asker.end()
        full = logprobs[0]
        for (prompt, _, name, _), mine in zip(asked, logprobs, strict=True):
            if name == FULL:
                full = mine
            else:
                kls, costs = found[name]
                kls.append(float((full.exp() * (full - mine)).sum(-1).mean()))
                costs.append(row_share(grid[name], [prompt], page_size, num_layers))
    return found


def _row(asked: ReuseParams, kls: list[float], costs: list[float]) -> dict[str, Any]:
    """A row as `runtime.reuse.fusion.table.Measured` reads it."""
    return {
        **asked.model_dump(exclude_none=True),
        "kl": round(max(float(np.mean(kls)), 0), 5),
        "cost": round(float(np.mean(costs)), 4),
    }
