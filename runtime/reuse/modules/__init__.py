"""Prompt modules (Prompt Cache, Gim et al. 2023): each is encoded alone and read by every prompt that imports it."""
