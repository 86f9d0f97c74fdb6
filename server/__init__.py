"""The HTTP server and the `ramet` command: who may ask, and how. Knows the runtime, never torch."""
