"""Adapters that ship with Ramet, each a change of the default model."""

# The short names that `--model` takes; each is an adapter file of this package.
ADAPTERS = ("smollm2-135m-diffusion",)
