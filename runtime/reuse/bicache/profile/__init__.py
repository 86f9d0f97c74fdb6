"""Measurement of the layers in which a model's shared prefixes can be reused (BiCache, section 5.1)."""
