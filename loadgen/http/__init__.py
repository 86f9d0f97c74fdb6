"""Load on any server, over HTTP alone."""
