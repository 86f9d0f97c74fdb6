"""Anthropic's routes."""
