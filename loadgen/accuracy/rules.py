"""Depths of reuse by each rule, from a profile of the benchmark's tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.accuracy.measure import Cell
from loadgen.accuracy.tasks import Source
from runtime.reuse.bicache.profile.records import Records
from runtime.reuse.bicache.profile.samples import Sample
from runtime.reuse.bicache.profile.settings import ProfileSettings

if TYPE_CHECKING:
    from runtime.execution.executor import Executor


class TaskSamples:
    """Requests of some tasks in turn, without their answers, because a profile needs no labels."""

    def __init__(self, tasks: Sequence[str], room: int, source: Source):
        self._tasks, self._room, self._source = tasks, room, source

    def sample(self, ratio: int, number: int, kept: int = 100) -> Sample:
        """Sample `number` with `ratio` percent of it shared, or more where the task needs it; `kept` is always 100."""
        assert kept == 100
        cell = Cell(self._tasks[number % len(self._tasks)], self._room, ratio / 100)
        (example,) = cell.group(self._source, number, 1)
        return Sample(example.prefix, example.suffix, self._room)

    def longest(self, settings: ProfileSettings) -> int:
        """Positions of the longest sample."""
        return max(self.sample(ratio, n).length for ratio in settings.ratios for n in range(settings.samples))


class Rules:
    """The depths of a profile at one of its ratios, in percent."""

    def __init__(self, table: dict[str, Any]):
        self._table = table

    def by_threshold(self, ratio: int, threshold: float) -> int:
        """The paper's depth at a threshold of the similarity."""
        from runtime.reuse.bicache.profile.profiler import paper_depth

        return paper_depth(self._table["raw_similarity"][str(ratio)], threshold)

    def divergence(self, ratio: int, depth: int) -> float:
        """Mean nats at the depth of a rule."""
        return self._table["divergence"][str(ratio)].get(str(depth), 0.0)  # depth 1 is exact

    def calibrated(self, ratio: int) -> int:
        """The paper's depth, lowered until the outputs diverge by no more than the profile's bound."""
        return self._table["depths"][str(ratio)]


def profile_tasks(
    executor: Executor,
    samples: TaskSamples,
    settings: ProfileSettings,
    of: dict[str, Any],
    path: Path,
    before: Callable[[], None],
) -> Rules:
    """Profile an idle engine's model, unless `path` has it already.

    Args:
        executor: with pages of one token; the contents of its pool are overwritten.
        samples: the requests.
        settings: of the profile.
        of: further parameters on which the result depends.
        path: of the table; records lie beside it until it is written, so that an interrupted run goes on.
        before: called before each measurement; an exception from it ends the profile.

    Raises:
        ModelError: if the measurements beside `path` were begun with other settings.
    """
    from runtime.reuse.bicache.profile.probe import Probe
    from runtime.reuse.bicache.profile.profiler import Profiler

    header = {**of, "settings": settings.model_dump()}
    if path.exists() and (table := json.loads(path.read_text("utf-8"))).get("of") == header:
        return Rules(table)
    records = Records(path.with_name(path.name + ".partial"), header)
    table = Profiler(Probe(executor), samples, settings, records, before).run()
    path.write_text(json.dumps({**table, "of": header}) + "\n", encoding="utf-8")
    records.remove()
    return Rules(json.loads(path.read_text("utf-8")))
