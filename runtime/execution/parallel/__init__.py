"""Tensor parallelism: several processes run one model, each with some of the heads and MLP columns."""
