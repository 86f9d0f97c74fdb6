"""Attention over the paged pool: an interface and its backends."""
