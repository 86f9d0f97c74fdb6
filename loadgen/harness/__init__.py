"""The harness of all benches: options, alternating measurement, statistics, tables, plots and result pages."""

from loadgen.harness.bench import Bench, repeats_of, warmup_of
from loadgen.harness.results import BenchError, Cell, Figure, Results

__all__ = ["Bench", "BenchError", "Cell", "Figure", "Results", "repeats_of", "warmup_of"]
