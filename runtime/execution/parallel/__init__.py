"""Tensor parallel: one model over several processes, each with its share of the heads and of the inner dimension."""
