"""Receipts: digests by which `ramet verify` checks an answer."""

import hashlib
from array import array
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runtime.frontend.output import Encoded, Output
from runtime.protocol import ModelInfo

# Files of a model's directory that decide its answers.
_WEIGHTS = ("[!.]*.safetensors", "[!.]*.gguf", "[!.]*.bin", "config.json", "tokenizer.json", "tokenizer.model")
_PACKAGES = ("radix", "runtime")


def receipt_of(submission: Encoded, output: Output, info: ModelInfo) -> dict[str, Any]:
    """The receipt of one completion. Reads the weights at the first call, so it may take seconds.

    `exact` is false for prompts with parts, whose answers `ramet verify` does not compute again.
    """
    adapted = {"adapter": digest} if (digest := submission.namespace.adapter) else {}
    return {
        **identity_of(info),
        **adapted,
        "prompt": digest_of(submission.tokens),
        "parameters": submission.sampling.model_dump(mode="json", exclude_defaults=True),
        "output": digest_of(array("i", output.token_ids).tobytes()),
        "exact": submission.parted is None and submission.decoding is None,
    }


def identity_of(info: ModelInfo) -> dict[str, Any]:
    """The weights, the code, and how it computes."""
    engine = {"dtype": info.dtype, "device": info.device, "kernels": info.attention_backend, "code": info.model_impl}
    return {"weights": _weights(info.path), "build": _build(), "engine": engine}


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@cache
def _weights(path: str) -> str:
    return _digest_of_files(sorted(found for pattern in _WEIGHTS for found in Path(path).glob(pattern)), Path(path))


@cache
def _build() -> str:
    """Ramet's version, and a digest of its code and kernels."""
    specs = [find_spec(name) for name in _PACKAGES]
    roots = [Path(place) for spec in specs if spec for place in spec.submodule_search_locations or ()]
    digests = [_digest_of_files(sorted([*root.rglob("*.py"), *root.rglob("*.so")]), root) for root in roots]
    return f"{version('ramet')}-{digest_of(''.join(digests).encode())}"


def _digest_of_files(paths: Iterable[Path], root: Path) -> str:
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            whole.update(f"{path.relative_to(root)} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()
