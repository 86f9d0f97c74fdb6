"""Reuse strategies: which spans exist, and which rows must still be computed."""
