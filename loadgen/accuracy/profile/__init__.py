"""`ramet profile`: tables of how a model's KV can be reused, which the engine reads."""
