"""`ramet profile`: measures how a model's KV can be reused, and writes tables for the engine."""
