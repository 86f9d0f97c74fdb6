"""Tokens from logits: decoding, the sampler, log-probabilities."""
