"""`ramet profile --fusion`: the table from which `"reuse": {"method": "auto"}` picks a method for a model."""

import json
import random
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from loadgen.harness.statistics import estimate
from loadgen.http.prose import Prose
from loadgen.offline.document_methods import METHODS, row_share, ways
from loadgen.offline.forced import Ask, Asker
from loadgen.offline.profile.settings import ANSWER, DOCUMENTS, QUOTED, FusionSettings
from runtime.config import Config
from runtime.errors import ModelError
from runtime.features.chunks.ask import ReuseParams
from runtime.features.chunks.documents.plan import DocumentPlanner
from runtime.features.chunks.documents.prompt import TokenizedPrompt, lead_of
from runtime.features.chunks.documents.table import lead_id
from runtime.models.resolve import resolve_model
from runtime.models.spec import DecoderSpec
from runtime.models.tokenizer import Tokenizer

# Number of prompts that run together.
_BATCH = 2


class Quotations:
    """Prompts with documents from Ramet's own texts and the beginning of a quotation, which the answer continues."""

    def __init__(self, tokenizer: Tokenizer, settings: FusionSettings):
        self._tokenizer, self._settings, self._prose = tokenizer, settings, Prose(random.Random(0))
        self._head, self._tail = self._encode("Some texts follow.\n\n"), self._encode("\n\nOne of the texts says: ")
        self._lead = lead_of(tokenizer)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def sample(self, number: int) -> tuple[TokenizedPrompt, list[int]]:
        """Prompt number `number`, and the tokens of its answer."""
        rng, length = random.Random(f"{self._settings.seed} {number}"), self._settings.length // DOCUMENTS
        tokens, ranges, documents = array("i", [*self._tokenizer.leading_ids, *self._head]), [], []
        for _ in range(DOCUMENTS):
            documents.append(self._text(rng, length))
            ranges.append((len(tokens), len(tokens) + length))
            tokens.extend(documents[-1])
        one = rng.choice(documents)
        at = rng.randrange(length - QUOTED - ANSWER + 1)
        tokens.extend([*self._tail, *one[at : at + QUOTED]])
        answer = one[at + QUOTED : at + QUOTED + ANSWER]
        return TokenizedPrompt(tokens, ranges, [f"{i}" for i in range(DOCUMENTS)], self._lead), answer

    def _text(self, rng: random.Random, length: int) -> list[int]:
        """Exactly `length` tokens of prose."""
        found: list[int] = []
        while len(found) < length:
            found += self._encode(self._prose.reseeded(rng.random()).text(length) + "\n")
        return found[:length]


def profile_fusion(config: Config, settings: FusionSettings, out: Path) -> None:
    """Measure a model, and write and print its table. Raises ModelError."""
    path = resolve_model(config.model)
    spec = DecoderSpec.load(path)
    context_length = config.model.context_length or spec.context_length
    if not spec.causal:
        raise ModelError(f"{spec.architecture} is a diffusion model, which serves no documents")
    if settings.length + 128 > context_length:
        raise ModelError(f"--length is {settings.length}; prompts of 128 more do not fit into {context_length}")
    grid = ways(METHODS, [ratio / 100 for ratio in settings.ratios], ["token"])
    asker = Asker(path, **config.model.model_dump(exclude={"model"}))
    found = _measure(asker, Quotations(Tokenizer.load(path), settings), settings, grid)
    asker.close()
    rows = [_row(asked, *found[name]) for name, asked in grid.items()]
    table = {"model": spec.identity, "settings": settings.model_dump(), "measured": rows}
    out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"{'method':16}  KL, nats [95 %]           rows of full prefill")
    for name, (kls, costs) in found.items():
        middle, low, high = estimate(kls, "mean")
        print(f"{name:16}  {middle:.4f} [{low:.4f}, {high:.4f}]  {np.mean(costs):.3f}")


def _measure(
    asker: Asker, source: Quotations, settings: FusionSettings, grid: dict[str, ReuseParams]
) -> dict[str, tuple[list[float], list[float]]]:
    """By method, the mean KL of each answer, and its prompt's rows x layers as a share of full prefill's."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in grid}
    page_size, num_layers = asker.core.info.page_size, asker.core.executor.spec.num_layers
    numbers, planner = range(settings.samples), DocumentPlanner()
    for first in tqdm(range(0, settings.samples, _BATCH), desc="divergence", unit="batch"):
        drawn = [source.sample(number) for number in numbers[first : first + _BATCH]]
        asked: list[tuple[TokenizedPrompt, list[int], str | None, Ask]] = []
        for prompt, answer in drawn:
            tokens = prompt.tokens.tolist()
            asked.append((prompt, answer, None, Ask(tokens)))
            for name, way in grid.items():
                asked.append((prompt, answer, name, Ask(tokens, planner.plan(prompt, way).ask)))
        logprobs = asker.forced([ask for *_, ask in asked], [answer for _, answer, _, _ in asked])
        asker.end()
        full = logprobs[0]
        for (prompt, _, way_name, _), mine in zip(asked, logprobs, strict=True):
            if way_name is None:
                full = mine
            else:
                kls, costs = found[way_name]
                kls.append(float((full.exp() * (full - mine)).sum(-1).mean()))
                costs.append(row_share(grid[way_name], [prompt], page_size, num_layers))
    return found


def _row(asked: ReuseParams, kls: list[float], costs: list[float]) -> dict[str, Any]:
    """A row of the table, in the form of `runtime.features.chunks.documents.table.MeasuredMethod`."""
    return {
        **asked.model_dump(exclude_none=True),
        "lead": lead_id(asked.method),
        "kl": round(max(float(np.mean(kls)), 0), 5),
        "cost": round(float(np.mean(costs)), 4),
    }
