"""The report of a request with chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.features.chunks.ask import DocumentsReport, ModulesReport
from runtime.features.chunks.layout import titles_of
from runtime.features.chunks.methods import Scored

if TYPE_CHECKING:
    from runtime.features.chunks.lease import ChunkLease


def report_of(lease: ChunkLease) -> DocumentsReport | ModulesReport:
    """What a request has reused of its documents or modules, and what it has computed."""
    layout, ask, reused = lease.layout, lease.layout.ask, max(lease.request.cached_tokens, 0)
    common = {"exact": layout.is_exact, "reused_tokens": reused, "computed_tokens": lease.request.num_prompt - reused}
    if ask.method != "none":
        common |= _repair(lease)
    missing = {entry.namespace for entry in lease.computed}
    entries = [place.entry for place in layout.places if place.is_chunk]
    computed = [entry.name for entry in entries if entry.namespace in missing]
    if not ask.documents:
        return ModulesReport(modules=[entry.name for entry in entries], computed_modules=computed, **common)
    titles, cached = list(dict.fromkeys(titles_of(ask))), {entry.name for entry in entries} - {*computed}
    fresh = [title for title in titles if title not in cached]
    return DocumentsReport(documents=titles, computed_documents=fresh, chunk_tokens=ask.chunk_tokens, **common)


def _repair(lease: ChunkLease) -> dict[str, Any]:
    """The fields of a method, and of what it chose."""
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
