"""Measures answers, time and forward rows of a diffusion model's requests that share a prefix."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loadgen.experiments.accuracy.tasks import Example, Examples
from runtime.features.diffusion.ask import DiffusionParams, SharedPrefixReport
from runtime.frontend.output import Submission
from runtime.params import SamplingParams

if TYPE_CHECKING:
    from runtime.offline import Engine

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def group_of(source: Examples, task: str, number: int, room: int, ratio: float, questions: int) -> list[Example]:
    """Requests with a shared prefix of `ratio` times prefix, prompt and canvas, or more if the task needs it."""
    probe = source.group(task, number, room, questions)[0]
    rest = len(probe.suffix) + room
    return source.group(task, number, room, questions, round(rest * ratio / (1 - ratio)))


class Runner:
    """Runs groups on an engine, one request at a time."""

    def __init__(self, engine: Engine, end: int):
        self._engine, self._end = engine, end
        assert engine.info.decoding is not None
        self._layers = engine.info.decoding.num_layers

    def run(self, fields: dict[str, Any], examples: Sequence[Example], cold: bool = False) -> dict[str, Any]:
        """Figures of a group with these fields of `DiffusionParams`.

        `cold`: begin with an empty cache, so that the times include encoding the prefix and measuring depths.
        """
        params = DiffusionParams.model_validate({**fields, "prefix_tokens": len(examples[0].prefix)})
        if cold:
            self._engine.flush_cache()
        elif fields.get("reuse") is not False:
            short = params.model_copy(update={"gen_length": 1, "block_length": 1, "steps": 1})
            self._generate(examples[0], short)
        before, exact, right = self._rows(), [], []
        generated, depth, ratio = 0, 0, 0.0
        started, cpu = time.perf_counter(), time.process_time()
        for example in examples:
            tokens, depth = self._generate(example, params)
            wanted = example.answer[: example.answer.index(self._end) + 1]
            hits = sum(a == b for a, b in zip(tokens, wanted, strict=False))
            exact.append(float(hits == len(wanted)))
            right.append(hits / len(wanted))
            generated += len(tokens)
            ratio = len(example.prefix) / len(example.ids)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        rows = (self._rows() - before) / len(examples)
        figures = {"exact": exact, "right": right, "rate": generated / seconds, "by_cpu": generated / cpu}
        return {**figures, "rows": rows, "depth": depth, "ratio": ratio}

    def _rows(self) -> float:
        """The number of forward rows: rows x layers, divided by the number of layers."""
        return float(self._engine.state()["row_layers"] / self._layers)

    def _generate(self, example: Example, params: DiffusionParams) -> tuple[list[int], int]:
        *_, last = self._engine.stream_all([Submission(example.prefix + example.suffix, GREEDY, decoding=params)])
        return last.token_ids, last.reuse.shallow_depth if isinstance(last.reuse, SharedPrefixReport) else 0
