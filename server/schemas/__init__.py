"""Schemas of prompt modules: their store and routes."""
