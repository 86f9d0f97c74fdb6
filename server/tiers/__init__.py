"""Disk caches by hand: `ramet cache`."""
