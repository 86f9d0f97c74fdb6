"""`ramet bench bicache`: accuracy and cost of reusing a shared prefix in a diffusion model (BiCache, Table 1)."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, PrivateAttr

from loadgen.experiments.accuracy.measure import GREEDY, Runner, group_of
from loadgen.experiments.accuracy.tasks import TASKS, Examples
from loadgen.experiments.accuracy.vocabulary import Vocabulary
from loadgen.experiments.micro.cost_model import modelled_passes
from loadgen.experiments.micro.model_bench import ModelBench
from loadgen.harness import BenchError, Cell, Figure
from runtime.features.diffusion.ask import DiffusionParams, SharedPrefixReport
from runtime.frontend.output import Submission
from runtime.models.resolve import resolve_model
from runtime.offline import Engine

NO_CACHE, WITHIN, BICACHE, NAIVE = "no cache", "refreshed within the request (d = 0)", "BiCache", "reuse of all layers"
MEASURED, DRIFT, BOTH = "depth measured", "refreshed on drift", "depth measured, refreshed on drift"


class BiCacheBench(ModelBench):
    """Answers, time and forward rows of a diffusion model that reuses a shared prefix.

    In a repeat, each task has one list and its questions, which run one at a time. The clock starts after the prefix is
    encoded, but with `measured` the cache is empty at first.
    """

    sections = "work"
    figures = (
        Figure("exact", "answers right, %", ".1f", 100, statistic="mean", versus="difference", plotted=True),
        Figure("right", "tokens right, %", ".1f", 100, statistic="mean"),
        Figure("rate", "tokens/s", ".1f", versus="ratio", plotted=True),
        Figure("by_cpu", "tokens/CPU s", ".1f", versus="ratio"),
        Figure("rows", "rows an answer", ".0f", interval=False),
        Figure("depth", "depth", ".0f", interval=False),
        Figure("seconds", "seconds", ".2f", versus="ratio", plotted=True),
        Figure("model", "cost model", ".2f", interval=False),
        Figure("first", "first step, ms", ".0f", 1e3),
        Figure("second", "of a second request", ".0f", 1e3),
    )

    model: str = Field("smollm2-135m-diffusion", description="a diffusion model adapted to the tasks")
    tasks: tuple[str, ...] = Field(("keep",), description=f"of {', '.join(TASKS)}")
    ratios: tuple[float, ...] = Field((0.5, 0.75, 0.9), description="the prefix's shares of a request")
    room: PositiveInt = Field(32, description="tokens in the canvas")
    questions: PositiveInt = Field(4, description="requests that share a prefix")
    steps: PositiveInt = Field(32, description="of denoising")
    refresh_interval: PositiveInt = Field(4, description="R")
    depth: NonNegativeInt | None = Field(None, description="layers that BiCache reuses (default: by the model's table)")
    depths: tuple[NonNegativeInt, ...] = Field((), description="also measure these depths")
    block: PositiveInt = Field(8, description="block length of Fast-dLLM's caches")
    threshold: float = Field(0.9, description="confidence at which Fast-dLLM decides a token")
    measured: bool = Field(False, description="compare depths measured in serving and refresh on drift with the table")
    bound: float = Field(0.05, description="largest divergence at a measured depth, in nats")
    drift: float = Field(0.1, description="threshold of refreshes on drift")
    cost: bool = Field(False, description="only measure the time of requests with random tokens")
    prefix: PositiveInt = Field(512, description="with --cost: tokens in the shared prefix")
    prompt: PositiveInt = Field(16, description="with --cost: tokens in the prompt behind the prefix")
    batch: PositiveInt = Field(1, description="with --cost: requests at a time")

    _engine: Engine = PrivateAttr()
    _runner: Runner = PrivateAttr()
    _source: Examples = PrivateAttr()
    _layers: int = PrivateAttr()

    def baseline(self) -> tuple[str, str]:
        return "case", BICACHE if self.measured else NO_CACHE

    @contextmanager
    def session(self) -> Iterator[None]:
        if unknown := set(self.tasks) - set(TASKS):
            raise BenchError(f"--tasks: {min(unknown)} is none of {', '.join(TASKS)}")
        with Engine(self.model, **self.options(page_size=1)) as engine:
            if (info := engine.info.decoding) is None:
                raise BenchError(f"{self.model} is no diffusion model")
            vocabulary = Vocabulary(resolve_model(engine.config.model))
            self._engine, self._layers = engine, info.num_layers
            self._runner, self._source = Runner(engine, vocabulary.end), Examples(vocabulary, ("bench", self.seed))
            yield

    def cells(self) -> Iterator[Cell]:
        if self.cost:
            yield from ({"work": "cost", "case": case} for case in self._cases())
            return
        for task in self.tasks:
            for ratio in self.ratios:
                for case in self._cases():
                    yield {"work": f"{task}, r = {ratio:g}", "case": case}

    def _cases(self) -> dict[str, dict[str, Any]]:
        """By case, the fields of `DiffusionParams`: the rows of the paper's Table 1 and further ablations.

        Fast-dLLM alone refreshes the prefix in each block, as published. With BiCache, it refreshes the prefix's deep
        layers at the beginning of a block, at most once in R steps.
        """
        free: dict[str, Any] = {"gen_length": self.room, "steps": self.steps, "block_length": self.room}
        whole = {**free, "refresh_interval": self.refresh_interval}
        bicache = {**whole, "depth": self.depth}
        if self.measured:
            drift = {"refresh": "drift", "drift_threshold": self.drift}
            bound = {"depth_bound": self.bound}
            return {
                BICACHE: bicache,
                MEASURED: {**whole, **bound},
                DRIFT: {**free, **drift, "depth": self.depth},
                BOTH: {**free, **bound, **drift},
            }
        cases: dict[str, dict[str, Any]] = {
            NO_CACHE: {**whole, "reuse": False},
            NAIVE: {**whole, "depth": self._layers},
            WITHIN: {**whole, "depth": 0},
            BICACHE: bicache,
        }
        blocks: dict[str, Any] = {"block_length": self.block}
        if not self.cost:
            blocks["threshold"] = self.threshold
        for cache in ("prefix", "dual"):
            cases[f"Fast-dLLM, {cache} cache"] = {**whole, **blocks, "reuse": False, "cache": cache}
            cases[f"BiCache + Fast-dLLM, {cache} cache"] = {**bicache, **blocks, "cache": cache}
        return cases | {f"d = {depth}": {**whole, "depth": depth} for depth in self.depths}

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        fields = self._cases()[cell["case"]]
        if self.cost:
            return self._request(cell["case"], fields, draw)
        task, _, ratio = cell["work"].partition(", r = ")
        group = group_of(self._source, task, draw.randrange(1 << 30), self.room, float(ratio), self.questions)
        return self._runner.run(fields, group, self.measured)

    def _request(self, case: str, fields: dict[str, Any], draw: random.Random) -> dict[str, Any]:
        """Seconds of `batch` requests with an encoded prefix, and to the first step with a new and a cached prefix."""
        params = DiffusionParams.model_validate({**fields, "prefix_tokens": self.prefix})
        shown = params.model_copy(update={"stream_canvas": True, "steps": 2})
        prefix = self._tokens(draw, self.prefix)
        first, second = (self._first_step(prefix + self._tokens(draw, self.prompt), shown) for _ in "12")
        before, started = self._engine.state()["row_layers"], time.perf_counter()
        prompts = [prefix + self._tokens(draw, self.prompt) for _ in range(self.batch)]
        *_, last = self._engine.stream_all([Submission(prompt, GREEDY, decoding=params) for prompt in prompts])
        seconds = time.perf_counter() - started
        depth = last.reuse.shallow_depth if isinstance(last.reuse, SharedPrefixReport) else 0
        rows = (self._engine.state()["row_layers"] - before) / self._layers / self.batch
        found = {"seconds": seconds, "first": first, "second": second, "rows": rows, "depth": depth}
        return {**found, "model": self.modelled(case, depth)}

    def modelled(self, case: str, depth: int) -> float | None:
        """The cost by the cost model, as a share of full passes in all steps; None for cases that it does not cover."""
        if case == NO_CACHE:
            return 1.0
        if case not in (WITHIN, BICACHE, NAIVE):
            return None
        refreshes = -(-self.steps // self.refresh_interval)
        ratio = self.prefix / (self.prefix + self.prompt + self.room)
        return modelled_passes(refreshes, self.steps - refreshes, ratio, depth / self._layers) / self.steps

    def _tokens(self, draw: random.Random, count: int) -> list[int]:
        return [draw.randrange(4, self._engine.info.vocab_size) for _ in range(count)]

    def _first_step(self, tokens: list[int], params: DiffusionParams) -> float:
        started = time.perf_counter()
        outputs = self._engine.stream_all([Submission(tokens, GREEDY, decoding=params)])
        next(outputs)
        seconds = time.perf_counter() - started
        for _ in outputs:  # run the request to its end before the next one starts
            pass
        return seconds
