"""`ramet bench reasoning`: chains of thought with shared pages (ReasonCache), compared with exact decoding."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt, PrivateAttr

from loadgen.experiments.accuracy.chains import WRITTEN, read_chains
from loadgen.experiments.accuracy.reasoning import Comparison, Task, Thinker
from loadgen.experiments.micro.model_bench import ModelBench
from loadgen.harness import BenchError, Cell, Figure
from runtime.asks import ReasoningAsk
from runtime.models.tokenizer import Tokenizer

EXACT = "exact"
# Chains in a repeat of --quality.
_BATCH = 4


class Reasoning(ModelBench):
    """Chains of thought with shared pages, compared with exact decoding. Their tokens are forced one by one.

    For throughput, all requests come at once: into a pool that holds `room` of them, and into one that holds all.
    """

    sections = "work"
    figures = (
        Figure("rate", "tokens/s", versus="ratio", plotted=True),
        Figure("running", "requests that run", ".2f", interval=False),
        Figure("retracted", "retractions", interval=False),
        Figure("amsr", "AMSR, %", factor=100, statistic="mean"),
        Figure("peak", "peak", factor=100, interval=False),
        Figure("ended", "at the end", factor=100, interval=False),
        Figure("evaluation", "evaluation, % of CPU time", ".2f", 100, interval=False),
        Figure("step", "step, ms", factor=1e3),
        Figure("step", "p99", factor=1e3, statistic="p99"),
        Figure("kl", "KL, nats", ".4f", statistic="mean", plotted=True),
        Figure("agrees", "same likeliest token, %", factor=100, statistic="mean"),
        Figure("nll", "NLL, nats", ".3f", statistic="mean", versus="difference"),
        Figure("right", "right, %", factor=100, statistic="mean", versus="difference"),
    )

    page_size: PositiveInt = Field(8, description="tokens in a page")
    quality: bool = Field(
        False, description=f"compare predictions instead of times; a repeat has {_BATCH} chains a text"
    )
    texts: tuple[str, ...] = Field(
        ("worked", "alike"),
        description=f"{', '.join(WRITTEN)}, or a JSONL file of chains; throughput is measured with the first text",
    )
    length: PositiveInt = Field(800, description="tokens in a chain")
    requests: PositiveInt = Field(16, description="requests that come at once")
    room: float = Field(3, gt=0, description="requests that the small pool holds")
    percentiles: tuple[float, ...] = Field((20, 50, 80, 100), description="values of `percentile`; throughput uses 80")
    fill: PositiveInt = Field(40, description="most batches that fill the reservoir of distances")

    _thinkers: dict[str, Thinker] = PrivateAttr(default_factory=dict)
    _comparison: Comparison = PrivateAttr()
    _tokenizer: Tokenizer = PrivateAttr()

    def baseline(self) -> tuple[str, str]:
        return "way", EXACT

    @contextmanager
    def session(self) -> Iterator[None]:
        path = self.path()
        self._tokenizer = Tokenizer.load(path)
        for text in self.texts:
            if text not in WRITTEN and not Path(text).is_file():
                raise BenchError(f"--texts: {text} is no file, and none of {', '.join(WRITTEN)}")
        with ExitStack() as stack:
            for name, tokens in self._pools().items():
                running = max(self.requests, _BATCH)
                options = self.options(page_size=self.page_size, pool_tokens=tokens, max_running=running)
                thinker = Thinker(path, self.quality, **options)
                stack.callback(thinker.close)
                thinker.warm_up(self._tasks(self.texts[0], random.Random("warm-up")), _ask(100), self.fill)
                self._thinkers[name] = thinker
            if self.quality:
                self._comparison = Comparison(next(iter(self._thinkers.values())))
            yield

    def _pools(self) -> dict[str, int]:
        if self.quality:
            return {"quality": _BATCH * (2 * self.length + 512)}
        first = islice(self._tasks(self.texts[0], random.Random(0)), self.requests)
        # 10 % more, because later chains may be longer.
        pages = max(int(1.1 * (len(task.prompt) + len(task.forced))) for task in first) // self.page_size + 2
        return {
            f"{name} pool": int(held * pages) * self.page_size
            for name, held in (("small", self.room), ("large", self.requests))
        }

    def cells(self) -> Iterator[Cell]:
        if self.quality:
            for text in self.texts:
                for way in (EXACT, *(f"percentile {percentile:g}" for percentile in self.percentiles)):
                    yield {"work": text, "way": way}
            return
        for pool in self._thinkers:
            for way in (EXACT, "percentile 80"):
                yield {"work": pool, "way": way}

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        way = cell["way"]
        ask = None if way == EXACT else _ask(float(way.split()[1]))
        if self.quality:
            return self._comparison.compare(list(islice(self._tasks(cell["work"], draw), _BATCH)), ask)
        tasks = list(islice(self._tasks(self.texts[0], draw), self.requests))
        return self._thinkers[cell["work"]].serve(tasks, ask)

    def _tasks(self, text: str, draw: random.Random) -> Iterator[Task]:
        """The chains of a text. Chains from a file are used once."""
        if text in WRITTEN:
            while True:
                # Written chains end a little behind the wanted length, and then lead to an answer.
                yield Task.of(WRITTEN[text](draw, self.length), self._tokenizer, 2 * self.length)
        recorded = read_chains(Path(text))
        for chain in draw.sample(recorded, len(recorded)):
            yield Task.of(chain, self._tokenizer, self.length)


def _ask(percentile: float) -> ReasoningAsk:
    return ReasoningAsk(percentile)
