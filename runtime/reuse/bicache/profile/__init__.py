"""Measures in how many layers a model's shared prefixes can be reused (BiCache, section 5.1)."""
