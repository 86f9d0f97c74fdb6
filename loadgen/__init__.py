"""Load and benchmarks: how a server behaves, seen through HTTP alone."""
