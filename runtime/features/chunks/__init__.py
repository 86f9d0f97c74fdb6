"""Chunks: texts that are encoded apart from the prompts which read them, and repaired there."""
