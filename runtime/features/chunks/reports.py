"""The report of a request with chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.features.chunks.ask import DocumentsReport, ModulesReport
from runtime.features.chunks.layout import titles_of
from runtime.features.chunks.methods import Scored

if TYPE_CHECKING:
    from runtime.features.chunks.lease import ChunkLease


def report_of(lease: ChunkLease) -> DocumentsReport | ModulesReport:
    """What a request has reused of its documents or modules, and what it has computed."""
    found = _documents(lease) if lease.layout.ask.documents else _modules(lease)
    found.exact = lease.layout.is_exact
    if lease.layout.ask.method != "none":
        _add_repair(found, lease)
    return found


def _counts(lease: ChunkLease) -> tuple[int, int]:
    """Number of the prompt's tokens that were cached, and of the others."""
    reused = max(lease.request.cached_tokens, 0)
    return reused, lease.request.num_prompt - reused


def _names(lease: ChunkLease) -> tuple[list[str], list[str]]:
    """The names of the chunks, in the order of the prompt, and of those that were missing."""
    missing = {entry.namespace for entry in lease.computed}
    entries = [place.entry for place in lease.layout.places if place.is_chunk]
    return [entry.name for entry in entries], [entry.name for entry in entries if entry.namespace in missing]


def _modules(lease: ChunkLease) -> ModulesReport:
    (names, computed), (reused, fresh) = _names(lease), _counts(lease)
    return ModulesReport(modules=names, computed_modules=computed, reused_tokens=reused, computed_tokens=fresh)


def _documents(lease: ChunkLease) -> DocumentsReport:
    (names, computed), (reused, fresh) = _names(lease), _counts(lease)
    ask, cached = lease.layout.ask, {*names} - {*computed}
    titles = list(dict.fromkeys(titles_of(ask)))
    return DocumentsReport(
        documents=titles,
        computed_documents=[title for title in titles if title not in cached],
        chunk_tokens=ask.chunk_tokens,
        reused_tokens=reused,
        computed_tokens=fresh,
    )


def _add_repair(found: DocumentsReport | ModulesReport, lease: ChunkLease) -> None:
    """Add the method, and what it chose."""
    ask, chosen = lease.layout.ask, lease.chosen
    found.method, found.ratio, found.granularity = ask.method, ask.ratio, ask.granularity
    if ask.method == "legolink" and ask.ratio is None:
        found.k = ask.k
    found.chosen_before = 0 < lease.selected_for < len(lease.layout.prompt)
    found.recomputed_rows, found.row_layers = len(chosen), lease.request.row_layers
    if isinstance(lease.method, Scored) and not len(chosen):
        read = "documents are read as they were encoded" if ask.lead else "this is the answer of pie"
        found.note = f"{ask.method} computed no row again: {read}"
