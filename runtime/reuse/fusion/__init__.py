"""Reuse of documents anywhere in a prompt: chunks are encoded alone, and prompts recompute a few of their rows."""
