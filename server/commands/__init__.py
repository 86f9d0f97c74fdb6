"""`ramet explain`."""
