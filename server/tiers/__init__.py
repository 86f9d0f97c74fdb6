"""`ramet cache`."""
