"""Answers, time and forward rows of one group of requests under one case."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadgen.accuracy.cases import Case
from loadgen.accuracy.tasks import Example, Source
from runtime.frontend.output import Submission
from runtime.params import DiffusionParams, SamplingParams

if TYPE_CHECKING:
    from runtime.engine.offline import Engine

_GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Cell:
    """A kind of requests: a task at a ratio r = prefix / (prompt + canvas)."""

    task: str
    room: int
    ratio: float

    def group(self, source: Source, number: int, questions: int) -> list[Example]:
        """Requests that share a prefix as long as the ratio says, or longer where the task needs it."""
        probe = source.group(self.task, number, self.room, questions)[0]
        rest = len(probe.suffix) + self.room
        prefix = round(rest * self.ratio / (1 - self.ratio))
        return source.group(self.task, number, self.room, questions, prefix)


@dataclass(slots=True)
class Outcome:
    """Results of a group, or the sum of several.

    Attributes:
        answers: number of requests; `exact`: those with every token right, up to the answer's end.
        tokens: tokens of the right answers with their ends; `right`: those found in their place.
        generated: denoised tokens; `seconds`: time for them, one request after the other; `cpu_s`: CPU time.
        rows: forward rows (rows x layers over layers); with the encoding of the prefix in cold cases alone.
        depth: reused layers; `divergence`: the mean in nats that was measured with them while serving, if it was.
        ratio: the prefix's share of a request.
        parts: rows of each request of a group, in order: for encoding the prefix, behind the prefix, for refreshes, for
            measuring. Sums over groups; empty without reuse, and with Fast-dLLM's caches.
    """

    answers: int = 0
    exact: int = 0
    tokens: int = 0
    right: int = 0
    generated: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    rows: float = 0.0
    depth: int = 0
    ratio: float = 0.0
    divergence: float | None = None
    parts: list[list[float]] = field(default_factory=list)

    @classmethod
    def total(cls, outcomes: Iterable[Outcome]) -> Outcome:
        """The sum of several."""
        whole = cls()
        for outcome in outcomes:
            whole.add(outcome)
        return whole

    def add(self, other: Outcome) -> None:
        """Add the results of another group; depth, ratio and divergence become the other's."""
        for name in ("answers", "exact", "tokens", "right", "generated", "seconds", "cpu_s", "rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.depth, self.ratio, self.divergence = other.depth, other.ratio, other.divergence
        own = self.parts or [[0.0] * len(parts) for parts in other.parts]
        self.parts = [[a + b for a, b in zip(*both, strict=True)] for both in zip(own, other.parts, strict=True)]


class Runner:
    """Runs groups on an engine, one request at a time; the prefix is encoded before the clock starts, or else on it."""

    def __init__(self, engine: Engine, end: int):
        self._engine = engine
        self._end = end
        assert engine.info.diffusion is not None
        self._layers = engine.info.diffusion.num_layers

    def run(self, case: Case, examples: list[Example]) -> Outcome:
        """The results of a group under a case."""
        prefix = len(examples[0].prefix)
        params = case.params(prefix)
        if case.cold:
            self._engine.flush_cache()
        elif case.is_reusing:
            short = params.model_copy(update={"gen_length": 1, "block_length": 1, "steps": 1})
            self._generate(examples[0], short)
        out = Outcome()
        for example in examples:
            self._ask(example, params, out)
        if "depth_bound" in case.fields:
            out.divergence = self._divergence(out.depth)
        return out

    def _divergence(self, depth: int) -> float | None:
        metas = [node.meta.describe() for node in self._engine.core.cache.tree.nodes() if node.meta is not None]
        means = [ledger["depth"].get(str(depth)) for meta in metas for ledger in meta.get("measured", {}).values()]
        return next((mean for mean in means if mean is not None), None)

    def _ask(self, example: Example, params: DiffusionParams, out: Outcome) -> None:
        before = self._engine.state()["row_layers"]
        start, cpu = time.perf_counter(), time.process_time()
        tokens, reuse = self._generate(example, params)
        out.seconds += time.perf_counter() - start
        out.cpu_s += time.process_time() - cpu
        rows = (self._engine.state()["row_layers"] - before) / self._layers
        out.rows += rows
        if params.cache == "none" and reuse["shallow_depth"]:
            out.parts.append(self._parts(example, rows, reuse))
        wanted = example.answer[: example.answer.index(self._end) + 1]
        right = sum(a == b for a, b in zip(tokens, wanted, strict=False))
        out.answers += 1
        out.exact += right == len(wanted)
        out.tokens += len(wanted)
        out.right += right
        out.generated += len(tokens)
        out.depth, out.ratio = reuse["shallow_depth"], len(example.prefix) / len(example.ids)

    def _parts(self, example: Example, rows: float, reuse: dict[str, Any]) -> list[float]:
        """See `Outcome.parts`; what a depth changes within a request counts as measuring."""
        prefix = reuse["encoded_tokens"]
        encoding = 0 if reuse["cached_tokens"] else prefix
        behind = reuse["denoise_steps"] * (len(example.ids) - prefix)
        refreshes = 0.0
        if reuse["shallow_depth"] < self._layers:
            refreshes = reuse["refreshes"] * prefix * (self._layers - reuse["shallow_depth"] + 1) / self._layers
        return [encoding, behind, refreshes, rows - encoding - behind - refreshes]

    def _generate(self, example: Example, params: DiffusionParams) -> tuple[list[int], dict[str, Any]]:
        submission = Submission(example.prefix + example.suffix, _GREEDY, diffusion=params)
        *_, last = self._engine.stream_all([submission])
        return last.token_ids, {**(last.reuse or {}), "cached_tokens": last.cached_tokens}
