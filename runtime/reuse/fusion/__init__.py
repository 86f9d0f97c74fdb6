"""Documents anywhere in a prompt: their KV is reused, and mended by computing a few rows anew."""
