"""Attention over the paged pool: one interface, two backends."""
