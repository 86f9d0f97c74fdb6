"""`ramet bench documents`: reuse of documents anywhere in a prompt beside full prefill, in process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, PrivateAttr

from loadgen.accuracy.documents import TASKS, tokenize
from loadgen.accuracy.forced import Ask
from loadgen.accuracy.quality import BATCH, FIGURES, Judge
from loadgen.harness import BenchError, Cell, Figure
from loadgen.micro.documents import FULL, METHODS, PREFIX, Documents, Shape, ways
from loadgen.micro.model_bench import ModelBench
from runtime.frontend.documents.plan import DocumentPlanner
from runtime.params import ReuseParams

# Of the ways that are measured at all counts, by page.
_RATIO = 0.15
# Of the tasks' documents, which have about 200 tokens: a smaller share by page may be less than a page.
_LEAST_BY_PAGE = 0.15
# Methods whose throughput and pages are measured.
_SERVED = ("a3", "cacheblend", "legolink", "pie")

Ratio = Annotated[float, Field(ge=0, le=1)]


class DocumentReuse(ModelBench):
    """Documents that are all cached, in another order in each prompt, behind a cached system prompt."""

    sections = "work"
    figures = (
        Figure("ttft", "TTFT, ms", ".0f", 1e3, versus="ratio", plotted=True),
        Figure("row_layers", "rows x layers", ".0f", interval=False),
        Figure("formula", "by the papers", ".0f", interval=False),
        Figure("rate", "requests/s", ".3f", versus="ratio"),
        Figure("pages", "pages of one reader", ".0f", interval=False),
        Figure("more", "of each further one", ".1f", interval=False),
        *FIGURES,
    )

    quality: bool = Field(False, description=f"compare answers instead of times; a repeat is {BATCH} questions a task")
    methods: tuple[str, ...] = Field(METHODS, description="of reuse")
    ratios: tuple[Ratio, ...] = Field((0.05, _RATIO, 0.3), description="rows that are computed again")
    granularities: tuple[Literal["page", "token"], ...] = Field(("page", "token"), description="of the choice of rows")
    counts: tuple[PositiveInt, ...] = Field((4, 8, 15), description="documents of a prompt")
    at: PositiveInt = Field(8, description="count at which all ratios are measured, and throughput")
    tokens: PositiveInt = Field(512, description="of a document")
    system: PositiveInt = Field(64, description="tokens of the system prompt")
    question: PositiveInt = Field(32, description="tokens of a question")
    clients: PositiveInt = Field(8, description="that ask again once they have their answer")
    requests: PositiveInt = Field(8, description="of each measurement of throughput")
    output: PositiveInt = Field(16, description="output tokens of these")
    readers: PositiveInt = Field(16, description="requests that read one document at a time")
    tasks: tuple[str, ...] = Field((*TASKS,), description="questions of the quality")

    _drive: Documents = PrivateAttr()
    _judge: Judge = PrivateAttr()
    _ways: dict[str, ReuseParams | None] = PrivateAttr()

    def baseline(self) -> tuple[str, str]:
        return "way", FULL

    @contextmanager
    def session(self) -> Iterator[None]:
        for given, known in ((self.methods, METHODS), (self.tasks, TASKS)):
            if unknown := set(given) - set(known):
                raise BenchError(f"{min(unknown)} is none of {', '.join(known)}")
        self._ways = {FULL: None, PREFIX: None, **ways(self.methods, self.ratios, self.granularities)}
        path = self.path()
        if self.quality:
            self._judge = Judge.open(path, **self.options(max_running=64))
            drive: Any = self._judge.asker
        else:
            most, served = (self.system + count * self.tokens + self.question for count in (max(self.counts), self.at))
            running = max(self.clients, self.readers)
            # Room for the clients' prompts, each with the temporary pages of a dense look, and for what is cached.
            pool = 4 * most + 3 * running * served
            shape = Shape(self.tokens, self.system, self.question)
            options = self.options(max_running=running, pool_tokens=pool)
            drive = self._drive = Documents(path, max(*self.counts, self.at), shape, **options)
        try:
            yield
        finally:
            drive.close()

    def cells(self) -> Iterator[Cell]:
        if self.quality:
            for task in self.tasks:
                for name in self._ways:
                    if name != PREFIX and not self._is_no_page(self._ways[name]):
                        yield {"work": task, "way": name}
            return
        few = {FULL, PREFIX, *ways(self.methods, [_RATIO], ["page"])}
        for count in self.counts:
            for name in self._ways:
                if count == self.at or name in few:
                    yield {"work": f"{count} documents", "way": name}
        served = {FULL, *ways([one for one in self.methods if one in _SERVED], [_RATIO], ["page"])}
        for name in (name for name in self._ways if name in served):
            yield {"work": f"{self.clients} clients, {self.at} documents", "way": name}

    def _is_no_page(self, asked: ReuseParams | None) -> bool:
        """Whether the share of a task's documents that is computed again may be less than a page: it would be PIE."""
        return asked is not None and asked.granularity == "page" and 0 < (asked.ratio or 0) < _LEAST_BY_PAGE

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        work, name = cell["work"], cell["way"]
        if self.quality:
            return self._answers(work, name, draw)
        if "clients" in work:
            return self._served(self._ways[name], draw)
        return self._drive.first(int(work.partition(" ")[0]), name, self._ways[name], draw)

    def _served(self, asked: ReuseParams | None, draw: random.Random) -> dict[str, float]:
        rate = self._drive.closed_loop(self.at, asked, self.clients, self.requests, self.output, draw)
        one, every = (self._drive.pages(asked, count) for count in (1, self.readers))
        return {"rate": rate, "pages": one, "more": (every - one) / max(self.readers - 1, 1)}

    def _answers(self, task: str, name: str, draw: random.Random) -> dict[str, Any]:
        items = [TASKS[task](draw) for _ in range(BATCH)]
        prompts = [tokenize(item, self._judge.tokenizer) for item in items]
        full, asked, planner = [Ask(one.tokens.tolist()) for one in prompts], self._ways[name], DocumentPlanner()
        if asked is None:
            return self._judge.judge(task, items, full, None)
        mine = [Ask(one.tokens.tolist(), planner.plan(one, asked).reuse) for one in prompts]
        return self._judge.judge(task, items, full, mine)
