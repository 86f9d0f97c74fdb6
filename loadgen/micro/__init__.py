"""Benchmarks in process: one part of Ramet at a time."""
