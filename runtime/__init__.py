"""Ramet's runtime: requests in, tokens out.

`Engine` is Ramet as a library. It is imported when first used, so that a process that only talks to an engine does
not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.frontend.documents.prompt import Document, Segments
from runtime.frontend.output import Output, Submission
from runtime.frontend.schemas.program import prompt_program, role
from runtime.params import ReuseParams, SamplingParams

if TYPE_CHECKING:
    from runtime.offline import Engine

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


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from runtime.offline import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
