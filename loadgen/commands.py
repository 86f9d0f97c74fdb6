"""The benchmarks by name: `ramet bench NAME` is a module `bench_NAME.py` in one of loadgen's rooms.

Such a module has `add_arguments(parser)`, which adds its options, and `run(arguments)`, which measures, prints tables,
writes the files that the options name (`loadgen/http/outputs.py`), and returns the exit code. The first line of its
docstring, behind "`ramet bench NAME`: ", is its help text.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

BENCHES = {path.stem.removeprefix("bench_"): path for path in sorted(Path(__file__).parent.glob("*/bench_*.py"))}


class _BenchParser(argparse.ArgumentParser):
    """The parser of one benchmark. Its module is imported when it is chosen, because some of them import torch."""

    bench: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.bench is not None:
            _module(self.bench).add_arguments(self)
            self.bench = None
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def add_benches(parser: argparse.ArgumentParser) -> None:
    """Add every benchmark as a subcommand; `run_bench` runs the chosen one."""
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH", parser_class=_BenchParser)
    for name, path in sorted(BENCHES.items()):
        summary = _summary(path)
        description = f"{summary[0].upper()}{summary[1:]}."
        benches.add_parser(name, help=summary.replace("%", "%%"), description=description).bench = name


def run_bench(arguments: argparse.Namespace) -> int:
    """Run the chosen benchmark; returns the exit code."""
    return _module(arguments.bench).run(arguments)


def _module(name: str) -> Any:
    path = BENCHES[name]
    return import_module(f"loadgen.{path.parent.name}.{path.stem}")


def _summary(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next(lines).partition(": ")[2].strip().removesuffix('"""').removesuffix(".")
