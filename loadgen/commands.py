"""The benches by name: `ramet bench NAME` is a module `bench_NAME.py` in one of loadgen's rooms.

Such a module defines one subclass of `loadgen.harness.Bench`. The first line of its docstring, behind
"`ramet bench NAME`: ", is its help text.
"""

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from loadgen.harness import Bench
from loadgen.harness import run as harness
from loadgen.harness.run import add_bench_options, add_report_options

BENCHES = {path.stem.removeprefix("bench_"): path for path in sorted(Path(__file__).parent.glob("*/bench_*.py"))}


class _BenchParser(argparse.ArgumentParser):
    """The parser of one benchmark. Its module is imported when it is chosen, because some of them import torch."""

    bench: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.bench is not None:
            add_bench_options(self, find_bench(self.bench))
            self.bench = None
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def add_benches(parser: argparse.ArgumentParser) -> None:
    """Add every benchmark as a subcommand, and `report`; `run_bench` runs the chosen one."""
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH", parser_class=_BenchParser)
    for name, path in sorted(BENCHES.items()):
        summary = _summary(path)
        description = f"{summary[0].upper()}{summary[1:]}."
        benches.add_parser(name, help=summary.replace("%", "%%"), description=description).bench = name
    summary = "show the results of earlier runs, several of them side by side"
    add_report_options(benches.add_parser("report", help=summary, description=f"{summary.capitalize()}."))


def run_bench(arguments: argparse.Namespace) -> int:
    """Run the chosen benchmark; returns the exit code."""
    if arguments.bench == "report":
        return harness.run_report(find_bench, arguments)
    return harness.run_bench(arguments.bench, find_bench(arguments.bench), arguments)


def find_bench(name: str) -> type[Bench]:
    """The bench that a module defines last. Raises ValueError if there is no such module."""
    if name not in BENCHES:
        raise ValueError(f"there is no bench {name!r}")
    module = import_module(f"loadgen.{BENCHES[name].parent.name}.{BENCHES[name].stem}")
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Bench)]
    return next(kind for kind in reversed(kinds) if kind.__module__ == module.__name__)


def _summary(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next(lines).partition(": ")[2].strip().removesuffix('"""').removesuffix(".")
