"""Prompt modules (Prompt Cache, Gim et al. 2023): entries that are encoded alone, and read by every request."""
