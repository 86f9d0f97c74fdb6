"""Adapters that ship with Ramet, each a change of the default model."""
