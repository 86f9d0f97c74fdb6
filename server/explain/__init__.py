"""Reasons for cache misses: rendered prompts compared, earlier answers remembered."""
