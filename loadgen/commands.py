"""Finds benches: `ramet bench NAME` is the module `bench_NAME.py` in a room of loadgen or of its experiments.

A module defines one subclass of `loadgen.harness.Bench`. The first line of its docstring, without
"`ramet bench NAME`: ", is the help text.
"""

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from loadgen.harness import Bench, BenchError
from loadgen.harness import run as harness
from loadgen.harness.run import add_bench_options, add_report_options

_ROOT = Path(__file__).parent
BENCHES = {path.stem.removeprefix("bench_"): path for path in sorted(_ROOT.rglob("bench_*.py"))}
# The benches of `loadgen/experiments`, which is in the repository, and in no wheel.
EXPERIMENTS = (
    "bicache", "documents", "drafts", "fleet", "gpu", "gsm8k", "holds", "humaneval", "modules", "points", "reasoning",
    "step", "tiers", "tree", "user",
)  # fmt: skip
MISSING = tuple(name for name in EXPERIMENTS if name not in BENCHES)


class _BenchParser(argparse.ArgumentParser):
    """The parser of one bench. It imports the bench's module only if it is chosen, because some import torch."""

    bench: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.bench is not None:
            try:
                add_bench_options(self, find_bench(self.bench))
            except BenchError as error:
                self.error(str(error))
            self.bench = None
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def add_benches(parser: argparse.ArgumentParser) -> None:
    """Add every bench and `report` as subcommands; `run_bench` runs the chosen one."""
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH", parser_class=_BenchParser)
    for name, path in sorted(BENCHES.items()):
        summary = _summary(path)
        description = f"{summary[0].upper()}{summary[1:]}."
        benches.add_parser(name, help=summary.replace("%", "%%"), description=description).bench = name
    for name in MISSING:  # without a help text, so that the list shows none of them
        benches.add_parser(name, add_help=False).bench = name
    if MISSING:
        parser.epilog = f"Only a checkout of Ramet's repository has the experiments: {', '.join(MISSING)}."
    summary = "show the results of one or several earlier runs, side by side"
    add_report_options(benches.add_parser("report", help=summary, description=f"{summary.capitalize()}."))


def run_bench(arguments: argparse.Namespace) -> int:
    """Run the chosen bench; returns the exit code."""
    if arguments.bench == "report":
        return harness.run_report(find_bench, arguments)
    return harness.run_bench(arguments.bench, find_bench(arguments.bench), arguments)


def find_bench(name: str) -> type[Bench]:
    """The class of a bench. Raises BenchError if there is no such bench."""
    if name in MISSING:
        raise BenchError(
            f"the bench {name!r} is an experiment, and not installed; in a checkout of Ramet's repository, "
            f"`make extra-bench` and `.venv/bin/ramet bench {name}` run it"
        )
    if name not in BENCHES:
        raise BenchError(f"there is no bench {name!r}")
    module = import_module(".".join(("loadgen", *BENCHES[name].relative_to(_ROOT).with_suffix("").parts)))
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Bench)]
    return next(kind for kind in reversed(kinds) if kind.__module__ == module.__name__)


def _summary(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next(lines).partition(": ")[2].strip().removesuffix('"""').removesuffix(".")
