"""`ramet bench documents`: reuse of documents anywhere in a prompt, compared with full prefill, in process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, PrivateAttr

from loadgen.experiments.accuracy.documents import TASKS, tokenize
from loadgen.experiments.accuracy.quality import BATCH, FIGURES, Judge
from loadgen.experiments.micro.documents import FULL, PREFIX, Documents, Shape
from loadgen.experiments.micro.model_bench import ModelBench
from loadgen.harness import BenchError, Cell, Figure
from loadgen.offline.document_methods import METHODS, ways
from loadgen.offline.forced import Ask
from runtime.frontend.documents.plan import DocumentPlanner
from runtime.params import RATIO, ReuseParams

# Smallest ratio by page for the tasks. Their documents have about 200 tokens, of which less may be under a page.
_LEAST_BY_PAGE = 0.15
# Methods whose throughput and pages are measured.
_SERVED = ("a3", "cacheblend", "legolink", "pie")

Ratio = Annotated[float, Field(ge=0, le=1)]


class DocumentReuse(ModelBench):
    """Reuse of cached documents, whose order changes with each prompt, behind a cached system prompt."""

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

    quality: bool = Field(False, description=f"compare answers instead of times; a repeat has {BATCH} questions a task")
    methods: tuple[str, ...] = Field(METHODS, description="of reuse")
    ratios: tuple[Ratio, ...] = Field((0.05, RATIO, 0.3), description="shares of rows that are computed again")
    granularities: tuple[Literal["page", "token"], ...] = Field(("page", "token"), description="units of chosen rows")
    counts: tuple[PositiveInt, ...] = Field((4, 8, 15), description="numbers of documents in a prompt")
    at: PositiveInt = Field(8, description="number of documents for all ratios and for throughput")
    tokens: PositiveInt = Field(512, description="tokens in a document")
    system: PositiveInt = Field(64, description="tokens in the system prompt")
    question: PositiveInt = Field(32, description="tokens in a question")
    clients: PositiveInt = Field(8, description="throughput: clients, which ask again after each answer")
    requests: PositiveInt = Field(8, description="throughput: requests in a measurement")
    output: PositiveInt = Field(16, description="throughput: output tokens of a request")
    readers: PositiveInt = Field(16, description="simultaneous requests with the same document, to count pages")
    tasks: tuple[str, ...] = Field((*TASKS,), description="with --quality: tasks")

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
            # Room for the clients' prompts, for temporary pages of methods that look at all rows, and for the cache.
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
        few = {FULL, PREFIX, *ways(self.methods, [RATIO], ["token"])}
        for count in self.counts:
            for name in self._ways:
                if count == self.at or name in few:
                    yield {"work": f"{count} documents", "way": name}
        served = {FULL, *ways([one for one in self.methods if one in _SERVED], [RATIO], ["token"])}
        for name in (name for name in self._ways if name in served):
            yield {"work": f"{self.clients} clients, {self.at} documents", "way": name}

    def _is_no_page(self, asked: ReuseParams | None) -> bool:
        """Whether the ratio may be less than a page of a task's documents, so that the method would equal PIE."""
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
        mine = [Ask(one.tokens.tolist(), planner.plan(one, asked).ask) for one in prompts]
        return self._judge.judge(task, items, full, mine)
