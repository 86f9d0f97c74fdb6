"""Entries: KV that is encoded apart from the prompts which read it."""
