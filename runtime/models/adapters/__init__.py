"""Adapters that ship with Ramet, each a change of the default model."""

from importlib.resources import files

_SUFFIX = ".safetensors"

# The short names that `--model` takes: each is an adapter file of this package.
ADAPTERS = tuple(sorted(f.name.removesuffix(_SUFFIX) for f in files(__package__).iterdir() if f.name.endswith(_SUFFIX)))
