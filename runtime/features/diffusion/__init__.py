"""Diffusion models: the canvas, the choice of its tokens, Fast-dLLM."""
