"""Ramet's runtime: requests in, tokens out.

The names are imported when they are first used: an engine needs no prompt, and a server no engine, which loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.asks import ReuseParams
    from runtime.features.chunks.documents.prompt import Document, Segments
    from runtime.features.chunks.schemas.program import prompt_program, role
    from runtime.frontend.output import Output, Submission
    from runtime.offline import Engine
    from runtime.params import SamplingParams

__all__ = [
    "Document",
    "Engine",
    "Output",
    "ReuseParams",
    "SamplingParams",
    "Segments",
    "Submission",
    "prompt_program",
    "role",
]

_MODULES = {
    "Document": "runtime.features.chunks.documents.prompt",
    "Engine": "runtime.offline",
    "Output": "runtime.frontend.output",
    "ReuseParams": "runtime.asks",
    "SamplingParams": "runtime.params",
    "Segments": "runtime.features.chunks.documents.prompt",
    "Submission": "runtime.frontend.output",
    "prompt_program": "runtime.features.chunks.schemas.program",
    "role": "runtime.features.chunks.schemas.program",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
