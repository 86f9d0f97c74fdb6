"""What the steps of an engine spend their time on: kernels of the device, and calls of the host."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.table import Table

from loadgen.experiments.gpu.kernel_times import profile_kernels
from loadgen.experiments.gpu.speed import SHARED_MODES, Speed
from loadgen.harness import Results

# Steps that are profiled together, and steps before them.
_PROFILED, _WARM = 8, 3
STEPS = ("shared prefix", "shared prefix, no cascade", "decode", "question", "prompt")


class ProfiledSpeed(Speed):
    """An engine whose steps can be profiled, too."""

    def kernels(self, kind: str) -> dict[str, Any]:
        """Times by kernel and call, for each step, and the step's time without the profiler.

        `kind`: of `STEPS`: decode steps of requests behind one prefix; of requests without one; the step of a
        question behind a cached prefix; the steps of a prompt of half the prefix's length, together.
        """
        if kind in ("question", "prompt"):
            return self._prompt(kind == "question")
        sizes, mode = self._sizes, SHARED_MODES["no cascade" if "no cascade" in kind else "default"]
        with self._changed(mode):
            prefix = self.text(0 if kind == "decode" else sizes.prefix)
            if prefix:
                self.add(prefix, 1)
                self.first_tokens()
            for _ in range(sizes.shared_batch):
                own = sizes.context if kind == "decode" else sizes.question
                self.add(prefix + self.text(own), 4 * _PROFILED + _WARM)
            self.first_tokens()
            self.pace(_WARM)
            self.forget()
            found = self._profiled(lambda: self.pace(_PROFILED), _PROFILED)
            self.demand("sharing", kind == "shared prefix")
            return found

    def _prompt(self, is_question: bool) -> dict[str, Any]:
        sizes = self._sizes
        prefix = self.text(sizes.prefix if is_question else 0)

        def once() -> None:
            self.add(prefix + self.text(sizes.question if is_question else sizes.prefix // 2), 1)
            self.first_tokens()
            self.finish()

        try:
            if is_question:
                self.add(prefix, 1)
                self.finish()
            once()
            return self._profiled(once, 1)
        finally:
            self.end()

    def _profiled(self, work: Callable[[], object], steps: int) -> dict[str, Any]:
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        wall_s = (time.perf_counter() - started) / steps
        return {"step": wall_s, **profile_kernels(work, self.core.executor.device.type, steps)}


def kernel_tables(results: Results) -> Iterator[Table]:
    """A table of kernels, and one of the host's calls, for each kind of step that was measured."""
    for cell in results.cells.values():
        for figures in results.of(cell).values():
            for what in ("kernels", "calls"):
                if what in figures:
                    yield _table(f"{cell['steps']}: {what} of a step", figures[what])


def _table(title: str, rows: Iterable[dict[str, Any]]) -> Table:
    table = Table("us", "count", "name", title=title)
    for row in rows:
        table.add_row(f"{row['us']:.1f}", f"{row['count']:.1f}", row["name"])
    return table
