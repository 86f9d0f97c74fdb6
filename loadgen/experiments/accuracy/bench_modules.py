"""`ramet bench modules`: prompt modules, compared with full prefill and prefix caching, in process."""

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import Field, PositiveInt, PrivateAttr

from loadgen.experiments.accuracy.parts import TASKS, Item
from loadgen.experiments.accuracy.quality import BATCH, FIGURES, FULL, Judge
from loadgen.experiments.micro.model_bench import ModelBench
from loadgen.experiments.micro.modules import OTHER, SAME, Modules, imports
from loadgen.harness import BenchError, Cell, Figure
from loadgen.offline.forced import Ask
from runtime.features.chunks.ask import ChunksAsk, Mode
from runtime.features.chunks.schemas.schema import Schema
from runtime.models.tokenizer import Tokenizer

_PAIRS = "a scaffold of each pair"


class PromptModules(ModelBench):
    """Prompts that import cached modules in any order, followed by new text."""

    sections = "work"
    figures = (
        Figure("ttft", "TTFT, ms", ".0f", 1e3, versus="ratio", plotted=True),
        Figure("cached", "cached tokens", ".0f", interval=False),
        Figure("step", "decode step, ms", ".1f", 1e3),
        Figure("rate", "tokens/s", ".0f"),
        Figure("pages", "pages in use", ".0f", interval=False),
        *FIGURES,
    )

    quality: bool = Field(False, description=f"compare answers instead of times; a repeat has {BATCH} questions a task")
    lengths: tuple[PositiveInt, ...] = Field((1024, 2048, 4096, 7168), description="tokens of a prompt's modules")
    modules: PositiveInt = Field(8, description="modules in a prompt")
    new: PositiveInt = Field(64, description="tokens of new text behind the modules")
    arguments: tuple[int, ...] = Field((0, 5, 10), description="share of arguments in the modules' tokens, in percent")
    together: PositiveInt = Field(32, description="requests that decode together")
    shared: PositiveInt = Field(4096, description="tokens that the requests share when they decode together")
    steps: PositiveInt = Field(24, description="decode steps in a measurement")
    tasks: tuple[str, ...] = Field((*TASKS,), description="with --quality: tasks")

    _drive: Modules = PrivateAttr()
    _judge: Judge = PrivateAttr()

    def baseline(self) -> tuple[str, str]:
        return "way", FULL

    @contextmanager
    def session(self) -> Iterator[None]:
        if unknown := set(self.tasks) - set(TASKS):
            raise BenchError(f"--tasks: {min(unknown)} is none of {', '.join(TASKS)}")
        path = self.path()
        if self.quality:
            self._judge = Judge.open(path, **self.options(max_running=64))
            drive: Any = self._judge.asker
        else:
            options = self.options(max_running=self.together, pool_memory=2.0)
            drive = self._drive = Modules(path, self.modules, self.new, self.steps, **options)
        try:
            yield
        finally:
            drive.close()

    def cells(self) -> Iterator[Cell]:
        if self.quality:
            for task in self.tasks:
                pairs = (_PAIRS,) if TASKS[task](random.Random(0)).pairs else ()
                for way in (FULL, "independent", "nested", *pairs, "a scaffold of all"):
                    yield {"work": task, "way": way}
            return
        for length in self.lengths:
            for way in (FULL, OTHER, SAME, *map(imports, self.arguments)):
                yield {"work": f"{length} tokens", "way": way}
        for way in ("prefix caching", "modules"):
            yield {"work": f"{self.together} requests that share {self.shared} tokens", "way": way}

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        work, way = cell["work"], cell["way"]
        if self.quality:
            items = [TASKS[work](draw) for _ in range(BATCH)]
            context_length = self._judge.asker.core.info.context_length
            asks = [ways_of(item, self._judge.tokenizer, context_length) for item in items]
            full = [one[FULL] for one in asks]
            return self._judge.judge(work, items, full, None if way == FULL else [one[way] for one in asks])
        if "share" in work:
            return self._drive.together(self.shared, self.together, way == "modules")
        return self._drive.first(int(work.split()[0]), way, draw)


def ways_of(item: Item, tokenizer: Tokenizer, context_length: int) -> dict[str, Ask]:
    """By way, a prompt with the item's tokens. Full prefill comes first, without the gaps that unions leave."""
    lead = [] if item.question is None else tokenizer.encode(item.lead, add_special_tokens=False)

    def ask(mode: Mode, scaffolds: list[list[str]] | None = None) -> Ask:
        schema = Schema.read(item.schema(), tokenizer, context_length, mode, scaffolds)
        prompt = schema.compile(item.prompt())
        return Ask(prompt.tokens + lead, prompt.ask)

    paths = [f"/m{number}" for number in range(len(item.parts))]
    whole = ask("scaffold", [["/", *paths]])
    assert isinstance(whole.asked, ChunksAsk)
    (entry,) = whole.asked.modules
    ways = {
        FULL: Ask(array("i", entry.tokens).tolist() + whole.tokens),
        "independent": ask("independent"),
        "nested": ask("nested"),
    }
    if item.pairs:
        ways[_PAIRS] = ask("scaffold", [[paths[a], paths[b]] for a, b in item.pairs])
    return {**ways, "a scaffold of all": whole}
