"""HTTP: connections, limits, bodies, streams, and SGLang's routes."""
