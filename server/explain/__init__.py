"""Reasons for cache misses, found by comparing rendered prompts."""
