"""HTTP: connections, checks, limits, request bodies, streams."""
