"""Tables and the plot of `ramet bench documents`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.accuracy.bench_quality import COLUMNS, Figures, task_rows
from loadgen.accuracy.sections import Section
from loadgen.http.outputs import drawing
from loadgen.micro.documents import FULL, PREFIX
from loadgen.micro.intervals import centred, interval

# As the A3 paper has them: averages over LongBench with Llama-3-8B, 44.9 by full prefill.
_LONGBENCH = {"full": 6.4, "pie": 40.3, "cacheblend": 40.2, "legolink": 40.0, "a3": 43.2}
PUBLISHED = (
    "published: LongBench of Llama-3-8B, full / PIE / CacheBlend / LegoLink / A3: "
    + " / ".join(f"{score}" for score in _LONGBENCH.values())
    + " against 44.9 by full prefill; TTFT of full prefill is 2 times A3's, and 2.2 to 3.3 times CacheBlend's"
)
_DRAWS = 1000


def sections(found: dict[str, Any]) -> Iterator[Section]:
    """A table for each part that was measured; `found`: as it is written to JSON."""
    for count, ways in found.get("speed", {}).items():
        yield _speed(count, ways, found["settings"])
    if "throughput" in found:
        yield _throughput(found["throughput"], found["settings"])
    if "memory" in found:
        yield _memory(found["memory"], found["settings"])
    if "quality" in found:
        yield from _quality(found["quality"])


def _speed(count: str, ways: dict[str, Any], settings: dict[str, Any]) -> Section:
    rng = np.random.default_rng(0)
    full, prefix = ways[FULL], ways[PREFIX]
    rows = []
    for name, mine in ways.items():
        low, high = interval(np.array(mine["ttft"]), rng, np.median)
        share = float(np.mean(mine["row_layers"]) / np.mean(full["row_layers"]))
        cells = [f"{np.median(mine['ttft']):.0f} [{low:.0f}, {high:.0f}]", _ratio(mine["ttft"], full["ttft"], rng)]
        cells += [_ratio(mine["ttft"], prefix["ttft"], rng), f"{np.mean(mine['row_layers']):.0f}"]
        is_method = name not in (FULL, PREFIX)
        formula = mine["formula"] / full["formula"]
        cells += [f"{mine['formula']}", f"{share:.3f}"] if is_method else ["", f"{share:.3f}"]
        rows.append([name, *cells, _lost(mine["ttft"], full["ttft"], formula, rng) if formula < 1 else ""])
    title = (
        f"{count} cached documents of {settings['tokens']} tokens in random order, {settings['repeats']} prompts each"
    )
    columns = ("TTFT, ms [95 %]", "of full", "of prefix", "row_layers", "formula", "of full", "saving lost [95 %]")
    return Section(title, columns, rows)


def lost_share(time: float, rows: float) -> float:
    """The share of the saving promised by `rows` that is lost; both are shares of full prefill."""
    return ((1 - rows) - (1 - time)) / (1 - rows)


def _lost(mine: Sequence[float], full: Sequence[float], formula: float, rng: np.random.Generator) -> str:
    bounds = _bounds(mine, full, rng)
    low, high = (lost_share(bound, formula) for bound in bounds)
    return f"{lost_share(float(np.median(mine) / np.median(full)), formula):.0%} [{low:.0%}, {high:.0%}]"


def _bounds(mine: Sequence[float], base: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """95 % bootstrap interval of the ratio of two medians."""
    drawn = [np.median(rng.choice(values, (_DRAWS, len(values))), axis=1) for values in (mine, base)]
    return np.percentile(drawn[0] / drawn[1], (2.5, 97.5))


def _ratio(mine: Sequence[float], base: Sequence[float], rng: np.random.Generator) -> str:
    low, high = _bounds(mine, base, rng)
    return f"{np.median(mine) / np.median(base):.3f} [{low:.3f}, {high:.3f}]"


def _throughput(ways: dict[str, list[float]], settings: dict[str, Any]) -> Section:
    rows = []
    for name, rates in ways.items():
        rate = float(np.median(rates))
        tokens = rate * settings["output"]
        spread = f"{rate:.3f} ({min(rates):.3f}-{max(rates):.3f})"
        rows.append([name, spread, f"{tokens:.1f}", f"{rate / float(np.median(ways[FULL])):.2f}"])
    title = (
        f"{settings['clients']} clients, {settings['clients_documents']} documents, {settings['output']} output tokens"
    )
    return Section(title, ("requests/s (min-max)", "tokens/s", "of full"), rows)


def _memory(ways: dict[str, dict[str, int]], settings: dict[str, Any]) -> Section:
    readers = settings["readers"]
    rows = []
    for name, mine in ways.items():
        more = (mine["all"] - mine["one"]) / max(readers - 1, 1)
        rows.append([name, f"{mine['document']}", f"{mine['one']}", f"{mine['all']}", f"{more:.1f}"])
    columns = ("the document's pages", "1 request", f"{readers} requests", "each further one")
    return Section(f"pages in use while requests read the same document of {settings['tokens']} tokens", columns, rows)


def _quality(tasks: dict[str, Figures]) -> Iterator[Section]:
    rows = [row for task, figures in tasks.items() for row in task_rows(task, figures)]
    items = len(next(iter(next(iter(tasks.values())).values()))["nll"])
    yield Section(f"{items} questions a task, full prefill as the reference", COLUMNS[1:], rows)
    yield Section("A3 beside the same share of rows at random, KL in nats", ("", "A3 - random [95 %]", ""), _a3(tasks))


def _a3(tasks: dict[str, Figures]) -> list[list[str]]:
    """Differences of a question's mean KL, by task and ratio, and what their interval says."""
    rng, rows = np.random.default_rng(0), []
    for task, figures in tasks.items():
        for name in figures:
            if name.startswith("a3 ") and (other := name.replace("a3", "random", 1)) in figures:
                difference = kl(figures[name]) - kl(figures[other])
                low, high = interval(difference, rng)
                verdict = "lower" if high < 0 else "higher" if low > 0 else "not told apart"
                rows.append(
                    [task, name.removeprefix("a3 "), f"{difference.mean():+.4f} [{low:+.4f}, {high:+.4f}]", verdict]
                )
    return rows


def kl(mine: dict[str, list[Any]]) -> np.ndarray:
    """Mean KL of each question's answer, nats."""
    return np.array([np.mean(values) for values in mine["kl"]])


def plot(found: dict[str, Any], path: Path) -> None:
    """KL over the time to the first token, or over rows where no times were measured; a line for each method."""
    costs, label = costs_of(found)
    tasks: dict[str, Figures] = found["quality"]
    rows = -(-len(tasks) // 2)
    with drawing(path, (10.5, 3 * rows), rows, 2, squeeze=False) as grid:
        panels = list(grid.flat)
        for axes in panels[len(tasks) :]:
            axes.remove()
        colors: dict[str, str] = {}  # by method; single rows are hollow and dashed
        for axes, (task, figures) in zip(panels, tasks.items(), strict=False):
            for method, names in _lines(figures, costs):
                means, above = centred([kl(figures[name]) for name in names])
                x, beside = centred([np.array(costs[name]) for name in names], np.median)
                color = colors.setdefault(method.split(",")[0], f"C{len(colors)}")
                by_token = {"mfc": "white", "ls": "--"} if "," in method else {}
                axes.errorbar(x, means, above, beside, marker="o", capsize=2, label=method, color=color, **by_token)
            axes.set(title=task, xlabel=label, ylabel="KL to full prefill, nats", yscale="log")
            axes.grid(alpha=0.3)
        handles = {
            name: handle
            for axes in panels[: len(tasks)]
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        panels[0].figure.legend(handles.values(), handles.keys(), fontsize=8, loc="outside right center")


def costs_of(found: dict[str, Any]) -> tuple[dict[str, list[float]], str]:
    """Costs by way for the plot: of the count of documents with most ways; and their meaning."""
    if "speed" not in found:
        rows = list(found["rows"].values())
        means = {
            name: [float(np.mean([task[name] for task in rows if name in task]))] for task in rows for name in task
        }
        return means, "rows x layers, share of full prefill"
    count, ways = max(found["speed"].items(), key=lambda item: len(item[1]))
    return {name: mine["ttft"] for name, mine in ways.items()}, f"time to first token, ms, {count} documents"


def _lines(figures: Figures, costs: dict[str, list[float]]) -> Iterator[tuple[str, list[str]]]:
    """Methods, and the names of their ways that were measured and have a KL that a logarithm can show."""
    lines: dict[str, list[str]] = {}
    for name in figures:
        method, _, options = name.partition(" ")
        if name in costs and kl(figures[name]).mean() > 1e-6:
            lines.setdefault(f"{method}, tokens" if options.endswith("tokens") else method, []).append(name)
    yield from lines.items()
