"""Tensor parallelism: one model over several processes, each with a part of the heads and of the inner dimension."""
