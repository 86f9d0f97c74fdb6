"""Adapters of the default model that ship with Ramet."""

from importlib.resources import files

_SUFFIX = ".safetensors.xz"

# Short names for `--model`, one for each adapter file in this package.
ADAPTERS = tuple(sorted(f.name.removesuffix(_SUFFIX) for f in files(__package__).iterdir() if f.name.endswith(_SUFFIX)))
