"""Benchmarks: of servers over HTTP, and of parts of Ramet in this process."""
