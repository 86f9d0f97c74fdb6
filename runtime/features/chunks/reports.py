"""The `reuse` field of answers to prompts with chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.features.chunks.layout import titles_of
from runtime.features.chunks.methods import Scored

if TYPE_CHECKING:
    from runtime.features.chunks.lease import ChunkLease


def report_of(lease: ChunkLease) -> dict[str, Any]:
    """What a request has reused of its documents or modules, and what it has computed."""
    request, ask, reused = lease.request, lease.layout.ask, max(lease.request.cached_tokens, 0)
    chunks = _documents(lease) if ask.documents else _modules(lease)
    repair = _repair(lease) if ask.method != "none" else {}
    counts = {"reused_tokens": reused, "computed_tokens": request.num_prompt - reused}
    return {**chunks, "exact": lease.layout.is_exact, **repair, **counts}


def _modules(lease: ChunkLease) -> dict[str, Any]:
    missing = {entry.namespace for entry in lease.computed}
    entries = [place.entry for place in lease.layout.places if place.is_chunk]
    return {
        "strategy": "modules",
        "exact_modules": True,
        "modules": [entry.name for entry in entries],
        "computed_modules": [entry.name for entry in entries if entry.namespace in missing],
    }


def _documents(lease: ChunkLease) -> dict[str, Any]:
    missing = {entry.namespace for entry in lease.computed}
    entries = [place.entry for place in lease.layout.places if place.is_chunk]
    cached = {entry.name for entry in entries} - {entry.name for entry in entries if entry.namespace in missing}
    titles = list(dict.fromkeys(titles_of(lease.layout.ask)))
    return {
        "strategy": "fusion",
        "documents": titles,
        "computed_documents": [title for title in titles if title not in cached],
        "chunk_tokens": lease.layout.ask.chunk_tokens,
    }


def _repair(lease: ChunkLease) -> dict[str, Any]:
    ask = lease.layout.ask
    found = {
        "method": ask.method,
        "ratio": ask.ratio,
        "granularity": ask.granularity,
        "chosen_before": 0 < lease.selected_for < len(lease.layout.prompt),
        "recomputed_rows": len(lease.chosen),
        "row_layers": lease.request.row_layers,
    }
    if ask.method == "legolink" and ask.ratio is None:
        found["k"] = ask.k
    if isinstance(lease.method, Scored) and not len(lease.chosen):
        found["note"] = f"{ask.method} computed no row again: this is the answer of pie"
    return found
