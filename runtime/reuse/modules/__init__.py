"""Prompt Cache: prompt modules at fixed positions, in PML, a markup language (arXiv 2311.04934)."""
