"""`ramet bench compare`: results of `serve` side by side, with ratios and their 95 % intervals."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.table import Table

from loadgen.http import options
from loadgen.http.files import read_run
from loadgen.http.outputs import new_file
from loadgen.http.record import Record
from loadgen.http.report import write_comparison
from loadgen.http.tables import make_table, wide_console
from loadgen.http.verdict import beside, of_run

Statistic = Callable[[np.ndarray], float]
_WINDOWS = 20


@dataclass(frozen=True)
class Metric:
    """A figure of a run that can be resampled.

    Attributes:
        sample: independent pieces of the run (requests, or windows of time), one in each row.
        statistic: pieces to figure.
        factor: from its unit to the table's.
    """

    name: str
    sample: Callable[[Sequence[Record]], np.ndarray]
    statistic: Statistic
    factor: float = 1.0


def _latency(kind: str) -> Callable[[Sequence[Record]], np.ndarray]:
    def sample(records: Sequence[Record]) -> np.ndarray:
        values = (getattr(record, f"{kind}_s") for record in records if record.ok)
        return np.array([value for value in values if value is not None])

    return sample


def _output_windows(records: Sequence[Record]) -> np.ndarray:
    """Output tokens per second in windows of equal length."""
    good = [record for record in records if record.ok and record.arrivals_s]
    if not good:
        return np.array([])
    begin, end = min(r.scheduled_s for r in records), max(r.end_s for r in records)
    times = np.concatenate([r.arrivals_s for r in good])
    weights = np.concatenate([np.full(len(r.arrivals_s), r.output_tokens / len(r.arrivals_s)) for r in good])
    tokens, _ = np.histogram(times, bins=_WINDOWS, range=(begin, max(end, begin + 1e-9)), weights=weights)
    return tokens * _WINDOWS / max(end - begin, 1e-9)


def _cached_and_asked(records: Sequence[Record]) -> np.ndarray:
    told = [r for r in records if r.ok and r.cached_tokens is not None and r.prompt_tokens]
    return np.array([(r.cached_tokens, r.prompt_tokens) for r in told], dtype=float)


def _share(pairs: np.ndarray) -> float:
    return float(pairs[:, 0].sum() / pairs[:, 1].sum())


def _percentile(point: float, values: np.ndarray) -> float:
    return float(np.percentile(values, point))


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


METRICS = (
    Metric("output tokens/s", _output_windows, _mean),
    *(
        Metric(f"{kind.upper()} {name} ms", _latency(kind), statistic, 1000)
        for kind in ("ttft", "tpot", "e2e")
        for name, statistic in (
            ("mean", _mean),
            ("p50", partial(_percentile, 50)),
            ("p90", partial(_percentile, 90)),
            ("p99", partial(_percentile, 99)),
        )
    ),
    Metric("hit ratio %", _cached_and_asked, _share, 100),
)


def ratio_interval(
    mine: np.ndarray, base: np.ndarray, statistic: Statistic, draws: int, rng: np.random.Generator
) -> tuple[float, float]:
    """95 % bootstrap interval of statistic(mine) / statistic(base); both are resampled independently."""
    ratios = []
    for _ in range(draws):
        under = statistic(base[rng.integers(len(base), size=len(base))])
        if under:
            ratios.append(statistic(mine[rng.integers(len(mine), size=len(mine))]) / under)
    low, high = np.percentile(ratios, (2.5, 97.5)) if ratios else (np.nan, np.nan)
    return float(low), float(high)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", metavar="JSON", help="of `serve`; ratios are over the first")
    parser.add_argument("--draws", type=options.count, default=1000, help="of the bootstrap; default: 1000")
    parser.add_argument("--seed", type=options.whole, default=0, help="of the bootstrap; default: 0")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="a report with plots of all runs, as one file")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; 0, or 2 if a file is not a result."""
    try:
        if arguments.html:
            options.need_matplotlib()
        runs = [read_run(path) for path in arguments.results]
    except (ValueError, OSError) as error:
        print(f"ramet bench: {error}", file=sys.stderr)
        return 2
    names = [f"{data['server']['name']} ({path.name})" for path, (data, _) in zip(arguments.results, runs, strict=True)]
    console = wide_console()
    several = [records for _, records in runs]
    table = compare_table(names, several, arguments.draws, arguments.seed)
    verdicts = [beside(name, mine, names[0], several[0]) for name, mine in zip(names[1:], several[1:], strict=True)]
    console.print(table, *(verdicts or [of_run(several[0])]), highlight=False)
    for name in ("workload", "arrivals"):
        if len({str(data[name]) for data, _ in runs}) > 1:
            console.print(f"the runs differ in their {name}", style="yellow")
            verdicts.append(f"The runs differ in their {name}.")
    if arguments.html:
        write_comparison(
            arguments.html, verdicts or [of_run(several[0])], table, dict(zip(names, several, strict=True))
        )
    return 0


def compare_table(names: Sequence[str], runs: Sequence[Sequence[Record]], draws: int, seed: int) -> Table:
    """A column for each run, and for all but the first its ratio to the first with the 95 % interval."""
    rng = np.random.default_rng(seed)
    columns = ["", names[0], *(column for name in names[1:] for column in (name, "ratio"))]
    table = make_table("ratios are over the first run, with 95 % bootstrap intervals", columns)
    for metric in METRICS:
        samples = [metric.sample(records) for records in runs]
        cells = []
        for number, sample in enumerate(samples):
            cells.append(f"{metric.factor * metric.statistic(sample):.1f}" if len(sample) else "-")
            if number:
                cells.append(_ratio(metric, sample, samples[0], draws, rng))
        if any(len(sample) for sample in samples):
            table.add_row(metric.name, *cells)
    failed = [sum(not record.ok for record in records) for records in runs]
    table.add_row("failed", *(cell for i, f in enumerate(failed) for cell in ([f"{f}", ""] if i else [f"{f}"])))
    return table


def _ratio(metric: Metric, mine: np.ndarray, base: np.ndarray, draws: int, rng: np.random.Generator) -> str:
    if not len(mine) or not len(base) or not (under := metric.statistic(base)):
        return "-"
    low, high = ratio_interval(mine, base, metric.statistic, draws, rng)
    return f"{metric.statistic(mine) / under:.2f} ({low:.2f}-{high:.2f})"
