"""The `chunks` strategy: prompts read documents and modules that were encoded apart, and repair some of their rows."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import msgspec

from radix import Namespace
from runtime.errors import InvalidRequest
from runtime.execution.executor import Executor
from runtime.features.chunks.ask import ChunksAsk
from runtime.features.chunks.choices import Choices
from runtime.features.chunks.entry import EntryMeta
from runtime.features.chunks.layout import Layout, lay_out
from runtime.features.chunks.lease import ChunkLease
from runtime.features.chunks.methods import METHODS
from runtime.kv.cache import PagedCache
from runtime.kv.segments import Run
from runtime.protocol import ModelInfo
from runtime.request import Request
from runtime.reuse.prefix import PrefixStrategy


class ChunkReuse(PrefixStrategy[ChunksAsk]):
    """Looks entries up by their content. The first request that needs a missing entry encodes it.

    An entry is encoded alone, or behind a lead, with causal attention among its own rows. Modules are encoded at the
    positions that their schema fixes; chunks of documents from position 0 on, and read with a shift. The KV of
    placeholder rows and of the lead goes to scratch pages. The kept rows fill whole pages, so readers need no mask.

    A request's own and repaired rows are cached as in `PrefixStrategy`, in a namespace that depends on what they read.
    The request's segments are the cached prefix of these rows, if any, and its entries.
    """

    name = "chunks"
    counted = ("encoded_modules", "encoded_documents", "fused_rows")

    def __init__(self, cache: PagedCache, executor: Executor, model: ModelInfo):
        super().__init__(cache, executor.spec.num_layers)
        self.executor = executor
        self.choices = Choices()
        self._model = model

    def open(self, request: Request, ask: ChunksAsk) -> ChunkLease:
        """Read and check the message. A request with modules and without own tokens only encodes these."""
        if request.sampler.prompt_logprobs_from is not None:
            raise InvalidRequest(f"prompts with {ask.kind}s have no log-probabilities", param="prompt_logprobs")
        if not request.tokens and (not ask.modules or request.wants_tokens):
            raise InvalidRequest("the prompt has no tokens of its own", param="prompt")
        layout = self._layout(request.tokens, ask, request.namespace)
        method = METHODS[ask.method](layout)
        if not method.reads_all and self.executor.decoder.code != "ramet":
            message = f"method {method.name!r} is for models that Ramet's own code computes"
            raise InvalidRequest(message, param="reuse.method")
        if method.look is not None and self.executor.spec.num_kv_heads != self.cache.pool.k.shape[2]:
            raise InvalidRequest(f"method {method.name!r} is not served by several ranks", param="reuse.method")
        lease = ChunkLease(self, request, layout, method)
        self._bound(lease)
        return lease

    def _layout(self, tokens: array[int], ask: ChunksAsk, namespace: Namespace) -> Layout:
        layout = lay_out(tokens, ask, namespace, self._model, METHODS[ask.method].reuses_question)
        # Each entry takes at least one page.
        if (most := self.cache.pool.num_pages) < (count := len(layout.places)):
            message = f"the prompt reads {count} entries; the KV pool has {most} pages"
            raise InvalidRequest(message, param="reuse", code="context_length_exceeded")
        return layout

    def _bound(self, lease: ChunkLease) -> None:
        """Limit the output by context and pool, if the request sets no limit.

        Raises:
            InvalidRequest: if the request needs more pages than the pool has.
        """
        request, pool, pages_for = lease.request, self.cache.pool, self.cache.pages_for
        entries = sum(pages_for(entry.length) for entry in lease.entries) + lease.scratch_pages(lease.entries)
        pages = entries + sum(lease.look_pages)
        if request.sampler.params.max_new_tokens is None:
            in_context = request.prompt_len + self._model.context_length - 1 - int(lease.layout.positions[-1])
            in_pool = (pool.num_pages - pages) * pool.page_size
            request.max_length = max(min(in_context, in_pool), request.prompt_len + 1)
        if pages + (own := pages_for(request.max_length)) > pool.num_pages:
            raise InvalidRequest(
                f"{lease.layout.ask.kind}s take {pages} pages of {pool.page_size} tokens, and other text and output "
                f"{own} more; the KV pool has {pool.num_pages}",
                param="prompt",
                code="context_length_exceeded",
            )

    def runs(self, tokens: array[int], namespace: Namespace, ask: ChunksAsk | None = None) -> list[Run]:
        """One run for each different chunk."""
        assert ask is not None
        entries = [place.entry for place in self._layout(tokens, ask, namespace).places if place.is_chunk]
        return [entry.run() for entry in {entry.namespace: entry for entry in entries}.values()]

    def slices(self, ask: ChunksAsk, most: int) -> Sequence[ChunksAsk]:
        """Modules a few at a time, but documents together, as their positions are those of the prompt."""
        if not ask.modules:
            return [ask]
        starts = range(0, len(ask.modules), most)
        return [msgspec.structs.replace(ask, modules=ask.modules[i : i + most]) for i in starts]

    def meta_of(self, namespace: Namespace, described: Mapping[str, object]) -> EntryMeta | None:
        kind, more = namespace.entry.partition(":")[0], dict(described)
        if kind not in ("document", "module"):
            return None
        name, tokens = more.pop(kind), more.pop(f"{kind}_tokens")
        return EntryMeta(kind, msgspec.convert(name, str), msgspec.convert(tokens, int), more)

    def flush(self) -> None:
        self.choices.clear()
