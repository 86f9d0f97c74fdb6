"""`ramet bench humaneval`: programs that a model writes, equal under all conditions, and how many are right."""

import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from pydantic import Field, FilePath, PositiveInt, PrivateAttr

from loadgen.experiments.accuracy.programs import Problem, read_problems
from loadgen.experiments.micro.model_bench import ModelBench
from loadgen.harness import Cell, Figure
from loadgen.harness.bench import repeats_of, warmup_of
from runtime import Engine, Output

_COLD = "cold"
_GREEDY = {"temperature": 0}
# By condition, the options of its engine. `pool`: how many of the longest requests the pool holds.
_CONDITIONS: dict[str, dict[str, Any]] = {
    _COLD: {},
    "in batches": {},
    "warm": {},
    "drafts": {"drafts": "auto"},
    "evicting": {"pool": 3},
    "from disk": {},
}
_ASKED_TWICE = ("warm", "drafts")


class HumanEval(ModelBench):
    """Greedy answers to HumanEval, whose programs run in a process of their own.

    `cold` asks one problem after the other, each with an empty cache. All other conditions ask in batches. `warm` and
    `drafts` ask twice, `from disk` asks a second engine with the first one's files; they show the second answers.
    """

    figures = (
        Figure("right", "pass@1, %", factor=100, statistic="mean", versus="difference"),
        Figure("differs", "other answers", ".0f", statistic="sum", interval=False),
        Figure("tokens", "tokens", ".0f", statistic="sum", interval=False),
        Figure("cached", "cached, % of prompts", factor=100, statistic="mean", interval=False),
        Figure("loaded", "tokens from disk", ".0f", interval=False),
        Figure("accepted", "tokens of drafts", ".0f", interval=False),
        Figure("retracted", "retractions", ".0f", interval=False),
    )

    data: FilePath = Field(description="the problems: HumanEval.jsonl or HumanEval.jsonl.gz")
    problems: PositiveInt = Field(164, description="number of problems, the first ones of the file")
    output: PositiveInt = Field(400, description="most tokens in an answer")
    batch: PositiveInt = Field(16, description="requests at once")
    repeats: int = repeats_of(1)
    warmup: int = warmup_of(0)

    _problems: list[Problem] = PrivateAttr(default_factory=list)
    _first: list[str] = PrivateAttr(default_factory=list)

    def baseline(self) -> tuple[str, str]:
        return "condition", _COLD

    @contextmanager
    def session(self) -> Iterator[None]:
        self._problems = read_problems(self.data)[: self.problems]
        yield

    def cells(self) -> Iterator[Cell]:
        for condition in _CONDITIONS:
            yield {"condition": condition}

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        condition = cell["condition"]
        if condition != _COLD and not self._first:  # a resumed run
            self.measure({"condition": _COLD}, draw)
        said, retracted = self._ask(condition)
        texts = [output.text for output in said]
        if condition == _COLD:
            self._first = texts
        return {
            "right": [float(one.is_solved(text)) for one, text in zip(self._problems, texts, strict=True)],
            "differs": [float(one != text) for one, text in zip(self._first, texts, strict=True)],
            "tokens": [output.completion_tokens for output in said],
            "cached": [output.cached_tokens / output.prompt_tokens for output in said],
            "loaded": sum(sum(output.loaded_tokens.values()) for output in said),
            "accepted": sum(output.accepted for output in said),
            "retracted": retracted,
        }

    def _ask(self, condition: str) -> tuple[list[Output], int]:
        """All answers under a condition, and the number of retractions."""
        options = {"drafts": "off", **_CONDITIONS[condition]}
        with tempfile.TemporaryDirectory() as folder:
            if condition == "from disk":
                options["disk_cache"] = folder
                self._run(condition, options)
            return self._run(condition, options)

    def _run(self, condition: str, options: dict[str, Any]) -> tuple[list[Output], int]:
        with self._open(options) as (engine, prompts):
            if condition == _COLD:
                return [self._alone(engine, prompt) for prompt in prompts], 0
            said: list[Output] = []
            for _ in range(1 + (condition in _ASKED_TWICE)):
                said = self._in_batches(engine, prompts)
            return said, engine.core.scheduler.num_retracted

    @contextmanager
    def _open(self, options: dict[str, Any]) -> Iterator[tuple[Engine, list[list[int]]]]:
        """An engine, and the prompts."""
        held = options.pop("pool", None)
        if held is not None:
            with self._open({}) as (engine, prompts):
                page = engine.info.page_size
                options["pool_tokens"] = held * (math.ceil((max(map(len, prompts)) + self.output) / page) + 1) * page
        with Engine(str(self.path()), **self.options(max_running=self.batch, **options)) as engine:
            turns = ([{"role": "user", "content": problem.asked}] for problem in self._problems)
            texts = map(engine.tokenizer.apply_chat_template, turns)
            yield engine, [engine.tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def _alone(self, engine: Engine, prompt: list[int]) -> Output:
        engine.flush_cache()
        return engine.generate([prompt], self._sampling)[0]

    def _in_batches(self, engine: Engine, prompts: Sequence[list[int]]) -> list[Output]:
        parts = (prompts[first : first + self.batch] for first in range(0, len(prompts), self.batch))
        return [*chain.from_iterable(engine.generate(part, self._sampling) for part in parts)]

    @property
    def _sampling(self) -> dict[str, Any]:
        return {**_GREEDY, "max_new_tokens": self.output}
