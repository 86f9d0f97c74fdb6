"""`ramet bench modules`: prompt modules beside full prefill and prefix caching, in process."""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track
from rich.table import Table

from loadgen.http.bench_compare import ratio_interval
from loadgen.http.outputs import add_files, drawing, write_files
from loadgen.http.tables import make_table, wide_console
from loadgen.micro.drive import Drive, model_path

# Figures 3 and 4 of the paper: averages of 5,000 tokens, Llama2 7B.
_PUBLISHED = (
    "published, at 5,000 tokens: full prefill takes up to 70 times as long on an Intel CPU, up to 20 times on an AMD "
    "CPU, 5 to 10 times on GPUs; decoding is as fast as without modules"
)

Samples = dict[str, list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--dtype", default="auto", help="default: auto")
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[1024, 2048, 4096, 7168], help="tokens of modules, without arguments"
    )
    parser.add_argument("--modules", type=int, default=8, help="modules of a prompt (default: 8)")
    parser.add_argument("--new", type=int, default=64, help="tokens of new text (default: 64)")
    parser.add_argument("--arguments", type=int, nargs="*", default=[0, 5, 10], help="percents of the modules' tokens")
    parser.add_argument("--together", type=int, default=32, help="requests that decode together (default: 32)")
    parser.add_argument("--shared", type=int, default=4096, help="tokens that these share (default: 4096)")
    parser.add_argument("--steps", type=int, default=24, help="decode steps of each median (default: 24)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each median (default: 5)")
    add_files(parser, "plot", "json")


def run(arguments: argparse.Namespace) -> int:
    bench = Modules(model_path(arguments.model), arguments, dtype=arguments.dtype, pool_memory=2.0)
    figures: dict[str, Any] = {"backend": bench.core.info.attention_backend, "dtype": bench.core.info.dtype}
    figures["first"] = {n: bench.first(n) for n in track(arguments.lengths, description="time to first token")}
    figures["together"] = bench.together(arguments.shared)
    figures["page_mib"] = bench.page_mib
    console = wide_console()
    console.print(_first_table(figures["first"], arguments))
    console.print(_together_table(figures["together"], arguments))
    once = -(-arguments.shared // bench.core.info.page_size) * bench.page_mib
    console.print(
        f"KV of {arguments.shared} tokens takes {once:.1f} MiB, which all of them read; {arguments.together} copies "
        f"would take {arguments.together * once:.0f}"
    )
    console.print(_PUBLISHED)
    write_files(arguments, figures, plot=partial(_plot, figures["first"]))
    bench.close()
    return 0


class Modules(Drive):
    """An engine core, and requests that import modules, or have their tokens as text.

    Args:
        path: the model's directory.
        arguments: as of the bench.
        options: as of `ramet serve`.
    """

    def __init__(self, path: Path, arguments: argparse.Namespace, **options: Any):
        self._given = arguments
        super().__init__(path, max_running=max(arguments.together, 1), **options)

    @property
    def page_mib(self) -> float:
        """KV of a page, MiB."""
        pool = self.core.executor.pool
        return 2 * pool.k[:, : pool.page_size].numel() * pool.k.dtype.itemsize / 2**20

    def first(self, length: int) -> dict[str, Samples]:
        """Milliseconds until the first token, and of a decode step behind it, of each way to have the same prompt.

        The ways take turns, each with new text.
        """
        ways = self._ways(length)
        found: dict[str, Samples] = {name: {"first": [], "ttft": [], "tpot": [], "cached": []} for name in ways}
        for again in range(self._given.repeats + 1):
            for name, ask in ways.items():
                before = self.core.counters["cached_tokens"]
                ask()
                ttft_s, steps_s = self.first_tokens(), self.finish()
                mine = found[name]
                mine["ttft" if again else "first"].append(1e3 * ttft_s)  # the first turn fills the cache
                if again:
                    mine["tpot"].append(1e3 * float(np.median(steps_s)))
                    mine["cached"].append(self.core.counters["cached_tokens"] - before)
        self.end()
        return found

    def _ways(self, length: int) -> dict[str, Callable[[], None]]:
        modules = self._modules(length)
        output = 1 + self._given.steps

        def as_text(parts: Sequence[array[int]]) -> None:
            self.add(sum(parts, array("i")) + self.text(self._given.new), output)

        turns = count()

        def in_turn() -> None:
            first = next(turns) % len(modules)
            as_text(modules[first:] + modules[:first])

        ways = {
            "full prefill": lambda: as_text([self.text(len(one)) for one in modules]),
            "prefix caching, another order": in_turn,
            "prefix caching, the same order": lambda: as_text(modules),
        }
        for percent in self._given.arguments:
            ways[_name(percent)] = partial(self.add_modules, self._modules(length), output, percent)
        return ways

    def _modules(self, length: int) -> list[array[int]]:
        """Texts of about the same length, which is no multiple of a page."""
        count = self._given.modules
        cuts = [0, *(length * i // count + 5 * i % 16 for i in range(1, count)), length]
        return [self.text(stop - start) for start, stop in pairwise(cuts)]

    def add_modules(self, modules: Sequence[array[int]], output: int, percent: int = 0) -> None:
        """Add a request that imports modules in any order; `percent` of the tokens of each are an argument."""
        entries, own, anchors, at = [], array("i"), [], 0
        for one in modules:
            hole = len(one) * percent // 100
            holes = [[len(one) // 2, len(one) // 2 + hole]] if hole else []
            entries.append({"name": f"/{at}", "tokens": one.tobytes(), "anchors": [[0, at]], "holes": holes})
            if hole:
                anchors.append([len(own), at + len(one) // 2])
                own += self.text(hole)
            at += len(one)
        anchors.append([len(own), at])
        own += self.text(self._given.new)
        self.add(
            own, output, {"method": "modules", "entries": self._draw.sample(entries, len(entries)), "anchors": anchors}
        )

    def together(self, length: int) -> dict[str, Any]:
        """Decode steps, in milliseconds, of many requests that share modules or a prefix; and the pages they take."""
        modules, output = self._modules(length), 1 + self._given.steps
        prefix = sum(modules, array("i"))
        ways: dict[str, Callable[[], None]] = {
            "modules": lambda: self.add_modules(modules, output),
            "prefix": lambda: self.add(prefix + self.text(self._given.new), output),
        }
        found: dict[str, Any] = {name: {"step": [], "pages": 0} for name in ways}
        for again in range(self._given.repeats + 1):
            for name, ask in ways.items():
                for _ in range(self._given.together):
                    ask()
                self.first_tokens()
                state = self.core.admin.state()
                found[name]["pages"] = state["pages_locked"] + state["pages_private"]
                steps_s = self.finish()
                if again:
                    found[name]["step"].append(1e3 * float(np.median(steps_s)))
        self.end()
        return found


def _name(percent: int) -> str:
    return f"modules, {percent} % arguments"


def _spread(samples: Sequence[float]) -> str:
    return f"{np.median(samples):.1f} ({min(samples):.1f}-{max(samples):.1f})"


def _ratio(base: Sequence[float], mine: Sequence[float]) -> str:
    """The ratio of two medians with its 95 % interval."""
    rng = np.random.default_rng(0)
    low, high = ratio_interval(np.array(base), np.array(mine), np.median, 1000, rng)
    return f"{np.median(base) / np.median(mine):.3g} [{low:.3g}, {high:.3g}]"


def _first_table(first: dict[int, dict[str, Samples]], arguments: argparse.Namespace) -> Table:
    new = arguments.new
    columns = (
        "tokens of modules",
        "",
        "TTFT, ms (min-max)",
        "full prefill / this",
        "cached",
        "first request, ms",
    )
    table = make_table(f"until the first token, {new} new tokens", (*columns, "decode step, ms"), left=2)
    for length, ways in first.items():
        full = ways["full prefill"]["ttft"]
        for name, found in ways.items():
            cached = f"{np.mean(found['cached']) / (length + new):.0%}"
            cells = _spread(found["ttft"]), _ratio(full, found["ttft"]), cached, f"{found['first'][0]:.0f}"
            table.add_row(f"{length}", name, *cells, _spread(found["tpot"]))
        table.add_section()
    for name in next(iter(first.values()), {}):
        if len(first) > 1:
            slope, start = np.polyfit(list(first), [np.median(ways[name]["ttft"]) for ways in first.values()], 1)
            table.add_row("line", name, f"{start:.1f} + {1000 * slope:.1f} per 1,000 tokens", "", "", "", "")
    return table


def _together_table(together: dict[str, Any], arguments: argparse.Namespace) -> Table:
    count = arguments.together
    title = f"{count} requests that share {arguments.shared} tokens and have {arguments.new} of their own"
    table = make_table(title, ("", "decode step, ms (min-max)", "tokens/s", "of prefix", "pages in use"))
    for name, found in together.items():
        rate = 1e3 * count / float(np.median(found["step"]))
        of_prefix = _ratio(together["prefix"]["step"], found["step"])
        table.add_row(name, _spread(found["step"]), f"{rate:.0f}", of_prefix, f"{found['pages']}")
    return table


def _plot(first: dict[int, dict[str, Samples]], path: Path) -> None:
    with drawing(path, (11.2, 3.6), 1, 2) as panels:
        for axes, scale in zip(panels, ("linear", "log"), strict=True):
            for name in next(iter(first.values())):
                axes.plot(
                    list(first), [np.median(ways[name]["ttft"]) for ways in first.values()], marker="o", label=name
                )
            axes.set_yscale(scale)
            axes.set_xlabel("tokens of modules")
            axes.set_ylabel("time to first token, ms")
            axes.grid(alpha=0.3)
        axes.figure.legend(*axes.get_legend_handles_labels(), fontsize=7, loc="outside right center")
