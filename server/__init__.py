"""The HTTP server and the `ramet` command: routes, API keys, limits. Imports the runtime, never torch."""
