"""The benchmarks by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from loadgen.accuracy import bench_bicache
from loadgen.faults import bench_faults
from loadgen.gpu import bench_gpu
from loadgen.http import bench_compare, bench_prefix, bench_serve, bench_suite, bench_sweep
from loadgen.micro import bench_denoise, bench_growth, bench_policies, bench_scheduler, bench_tree


class Bench(NamedTuple):
    """A subcommand: what it measures, its options, and the function that returns its exit code."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


BENCHES = {
    "serve": Bench("load on a running server", bench_serve.add_arguments, bench_serve.run),
    "suite": Bench("six workloads on one or several servers, in turn", bench_suite.add_arguments, bench_suite.run),
    "sweep": Bench("more and more load, until a service level breaks", bench_sweep.add_arguments, bench_sweep.run),
    "compare": Bench("results of `serve` side by side", bench_compare.add_arguments, bench_compare.run),
    "prefix": Bench(
        "time to first token of a long shared prefix, cold and warm", bench_prefix.add_arguments, bench_prefix.run
    ),
    "policies": Bench(
        "hit ratio of every eviction policy on a recorded trace", bench_policies.add_arguments, bench_policies.run
    ),
    "denoise": Bench(
        "a diffusion model's request with and without reuse", bench_denoise.add_arguments, bench_denoise.run
    ),
    "scheduler": Bench(
        "time to first token under every admission policy (simulated), and what scheduling costs",
        bench_scheduler.add_arguments,
        bench_scheduler.run,
    ),
    "faults": Bench(
        "what a server survives: cut, slow and broken clients, a killed engine, a long soak",
        bench_faults.add_arguments,
        bench_faults.run,
    ),
    "growth": Bench("how the engine's costs grow with context and batch", bench_growth.add_arguments, bench_growth.run),
    "gpu": Bench("what the GPU path computes, and how fast", bench_gpu.add_arguments, bench_gpu.run),
    "bicache": Bench(
        "accuracy and cost of reusing a shared prefix in a diffusion model",
        bench_bicache.add_arguments,
        bench_bicache.run,
    ),
    "tree": Bench("what the radix tree's operations cost, alone", bench_tree.add_arguments, bench_tree.run),
}


def add_benches(parser: argparse.ArgumentParser) -> None:
    """The benchmarks as subcommands; `run_bench` runs the one that was chosen."""
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, bench in BENCHES.items():
        bench.add_arguments(benches.add_parser(name, help=bench.help, description=bench.help.capitalize() + "."))


def run_bench(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    return BENCHES[arguments.bench].run(arguments)
