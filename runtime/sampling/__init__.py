"""Tokens from logits: the sampler, log-probabilities, grammars."""
