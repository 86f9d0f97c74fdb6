"""Benchmarks in process, each of one part of Ramet."""
