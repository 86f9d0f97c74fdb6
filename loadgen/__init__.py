"""Benchmarks of a server over HTTP, and of parts of Ramet in process."""
