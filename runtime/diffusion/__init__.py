"""Diffusion models: the canvas, how its masks are decided, Fast-dLLM."""
