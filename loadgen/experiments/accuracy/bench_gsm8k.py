"""`ramet bench gsm8k`: shared reasoning steps (ReasonCache) in answers to GSM8K that a model writes itself."""

import math
import random
import re
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field, FilePath, PositiveInt, PrivateAttr, ValidationError

from loadgen.experiments.accuracy.reasoning import Thinker
from loadgen.experiments.micro.model_bench import ModelBench
from loadgen.harness import BenchError, Cell, Figure
from loadgen.harness.bench import repeats_of, warmup_of
from loadgen.harness.lines import UNREADABLE, numbered_lines
from runtime.asks import ReasoningAsk

_EXACT = "exact"
_ASKED = "{}\n\nReason step by step, with a blank line between steps. End with the answer as a number."
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Exercise(BaseModel):
    """A line of GSM8K; the answer ends with `#### NUMBER`."""

    question: str
    answer: str

    def is_right(self, text: str) -> bool:
        """Whether the last number of a text is the answer."""
        return (said := last_number(text)) is not None and said == last_number(self.answer)


def last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


class Gsm8k(ModelBench):
    """Sampled answers, all asked for at once, in a pool that holds a part of them. A repeat has fresh questions."""

    figures = (
        Figure("rate", "tokens/s", versus="ratio", plotted=True),
        Figure("right", "right, %", factor=100, statistic="mean", versus="difference"),
        Figure("amsr", "AMSR, %", factor=100, statistic="mean"),
        Figure("peak", "peak", factor=100, interval=False),
        Figure("running", "requests that run", ".1f", interval=False),
        Figure("retracted", "retractions", ".0f", interval=False),
        Figure("tokens", "tokens an answer", ".0f", statistic="mean", interval=False),
        Figure("compared", "distances so far", ".0f", interval=False),
        Figure("near", "p10", ".3g", interval=False),
        Figure("middle", "p50", ".3g", interval=False),
        Figure("far", "p90", ".3g", interval=False),
        Figure("evaluation", "evaluation, % of CPU time", ".2f", 100, interval=False),
    )

    data: FilePath = Field(description="the questions: GSM8K's test.jsonl")
    questions: PositiveInt = Field(16, description="questions in a repeat")
    samples: PositiveInt = Field(8, description="answers to each question")
    temperature: float = Field(0.7, ge=0)
    output: PositiveInt = Field(400, description="most tokens in an answer")
    length: PositiveInt = Field(250, description="tokens in an answer, as the pool's size supposes")
    share: float = Field(0.25, gt=0, description="of all prompts and answers, what the pool holds")
    page_size: PositiveInt = Field(8, description="tokens in a page")
    percentiles: tuple[float, ...] = Field(
        (100, 80), description="values of `percentile`; the first one fills the reservoir of distances"
    )
    repeats: int = repeats_of(1)
    warmup: int = warmup_of(0)

    _exercises: list[Exercise] = PrivateAttr(default_factory=list)
    _thinker: Thinker = PrivateAttr()

    def baseline(self) -> tuple[str, str]:
        return "way", _EXACT

    @contextmanager
    def session(self) -> Iterator[None]:
        self._exercises = _read(self.data)
        # Prompts of GSM8K have about 110 tokens.
        held = math.ceil(self.share * self.questions * (110 + self.samples * self.length) / self.page_size)
        pool = max(held, math.ceil((512 + self.output) / self.page_size)) * self.page_size
        running = self.questions * self.samples
        options = self.options(page_size=self.page_size, pool_tokens=pool, max_running=running)
        self._thinker = Thinker(self.path(), at_once=False, **options)
        try:
            yield
        finally:
            self._thinker.close()

    def cells(self) -> Iterator[Cell]:
        for way in (_EXACT, *(f"percentile {percentile:g}" for percentile in self.percentiles)):
            yield {"way": way}

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        ask = None if cell["way"] == _EXACT else ReasoningAsk(float(cell["way"].split()[1]))
        drawn = draw.sample(self._exercises, min(self.questions, len(self._exercises)))
        every = [one for one in drawn for _ in range(self.samples)]
        prompts = [self._prompt(one) for one in every]
        found, texts = self._thinker.sample(prompts, ask, self.output, temperature=self.temperature)
        tokens = [len(self._thinker.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        reservoir = self._thinker.strategy.reservoir
        near = np.percentile(reservoir.latest, (10, 50, 90)) if len(reservoir) else [None] * 3
        return {
            **{name: value for name, value in found.items() if name not in ("step", "ended")},
            "right": [float(one.is_right(text)) for one, text in zip(every, texts, strict=True)],
            "tokens": tokens,
            "compared": len(reservoir),
            **dict(zip(("near", "middle", "far"), near, strict=True)),
        }

    def _prompt(self, exercise: Exercise) -> "array[int]":
        tokenizer = self._thinker.tokenizer
        text = tokenizer.apply_chat_template([{"role": "user", "content": _ASKED.format(exercise.question)}])
        return array("i", tokenizer.encode(text, add_special_tokens=False))


def _read(path: Path) -> list[Exercise]:
    try:
        return [Exercise.model_validate_json(line) for _, line in numbered_lines(path)]
    except (*UNREADABLE, ValidationError) as error:
        raise BenchError(f"{path} is no file of GSM8K: {error}") from None
