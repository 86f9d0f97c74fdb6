"""The `modules` strategy (Prompt Cache): requests read entries that were encoded alone, wherever these lie."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import Any

import msgspec

from radix import Namespace
from runtime.errors import InvalidRequest
from runtime.kv.cache import PagedCache
from runtime.protocol import ModelInfo
from runtime.request import Request, Run
from runtime.reuse.entries.entry import Entry, Pairs, read_anchors, read_tokens
from runtime.reuse.entries.strategy import EntryStrategy, Imports, names_of
from runtime.reuse.modules.entry import Layout, ModuleMeta, read_entry


@dataclass(slots=True)
class ModuleImports(Imports):
    """`schema`: its name, for people."""

    schema: str = ""


class Modules(EntryStrategy):
    """Modules are entries, and are read wherever their schema has placed them: own rows see all of them."""

    name = "modules"
    counted = ("encoded_modules",)

    def __init__(self, cache: PagedCache, num_layers: int, model: ModelInfo):
        super().__init__(cache, num_layers)
        self._model = model

    # -- what is asked ---------------------------------------------------------------------------------------

    def open(self, request: Request, asked: dict[str, Any]) -> None:
        """A request without tokens of its own only encodes."""
        layout = Layout.read(asked)
        entries = self._entries(layout, request.namespace)
        own, anchors = request.sequence, layout.anchors
        if request.prompt_logprobs_from is not None:
            raise InvalidRequest("prompts with modules have no log-probabilities", param="prompt_logprobs")
        if not own.tokens:
            anchors = self._probe(request, entries)
        read_tokens(own.tokens.tobytes(), self._model.vocab_size, "the prompt")
        own.anchors = read_anchors(anchors, len(own.tokens), self._model.context_length, "the prompt")
        request.reuse = ModuleImports(entries, schema=layout.schema)
        for entry in entries:
            request.entry_tokens.extend(entry.tokens)
        request.namespace = _own_namespace(request.namespace, entries, own.anchors)
        self._fit(request, entries)

    def _entries(self, layout: Layout, namespace: Namespace) -> list[Entry]:
        if (most := self.cache.pool.num_pages) < len(layout.entries):  # each takes a page, and some time to be read
            raise InvalidRequest(
                f"there are {len(layout.entries)} modules; the KV pool has {most} pages",
                param="reuse",
                code="context_length_exceeded",
            )
        found: dict[Namespace, Entry] = {}
        for fields in layout.entries:
            entry = read_entry(fields, namespace, self._model)
            if entry is not None and found.setdefault(entry.namespace, entry) is not entry:
                raise InvalidRequest(f"entry {entry.name!r} is imported twice", param="reuse")
        # The same order in all requests, the longest first: those that read the same are neighbours in a step.
        return sorted(found.values(), key=lambda entry: (-entry.length, entry.namespace))

    def _probe(self, request: Request, entries: list[Entry]) -> Pairs:
        """Give a request one token, whose logits show that its entries are numbers; returns its anchors."""
        if not entries or request.wants_tokens:
            raise InvalidRequest("the prompt has no tokens of its own", param="prompt")
        last = entries[-1].sequence
        request.sequence.tokens.append(last.tokens[-1])
        request.prompt_len = request.max_tokens = 1
        return [(0, last.position(len(last.tokens) - 1))]

    def _fit(self, request: Request, entries: list[Entry]) -> None:
        """Bound the output of a request that does not; InvalidRequest if it could never have its pages."""
        pool, pages_for = self.cache.pool, self.cache.pages_for
        entry_pages = sum(pages_for(entry.length) + pages_for(entry.num_holes) for entry in entries)
        if request.sampling.max_new_tokens is None:
            own = request.sequence
            in_pool = (pool.num_pages - entry_pages) * pool.page_size
            in_context = self._model.context_length - own.position(len(own.tokens)) + len(own.tokens)
            request.max_tokens = max(min(in_pool, in_context), len(own.tokens) + 1)
        if entry_pages + pages_for(request.max_tokens) > pool.num_pages:
            raise InvalidRequest(
                f"the modules take {entry_pages} pages of {pool.page_size} tokens, and prompt and output "
                f"{pages_for(request.max_tokens)} more; the KV pool has {pool.num_pages}",
                param="prompt",
                code="context_length_exceeded",
            )

    def runs(self, tokens: array[int], namespace: Namespace, asked: dict[str, Any]) -> list[Run]:
        """One for each entry."""
        entries = self._entries(Layout.read(asked), namespace)
        return [Run(array("i", e.key), e.namespace, e.name) for e in entries]

    def _meta(self, request: Request, entry: Entry) -> ModuleMeta:
        return ModuleMeta(request.reuse.schema, entry.name, entry.length)

    def meta_of(self, namespace: Namespace, described: dict[str, Any]) -> ModuleMeta | None:
        if not namespace.entry.startswith("module:"):
            return None
        return ModuleMeta(described["schema"], described["module"], described["module_tokens"])

    def report(self, request: Request) -> dict[str, Any] | None:
        """With the first token: nothing of it changes later."""
        if request.num_output > 1:
            return None
        reused = max(request.cached_tokens, 0)
        return {
            "strategy": self.name,
            "exact": True,
            "modules": names_of(request.reuse.entries),
            "computed_modules": names_of(request.reuse.computed),
            "reused_tokens": reused,
            "computed_tokens": request.num_prompt - reused,
        }


def _own_namespace(namespace: Namespace, entries: list[Entry], anchors: Pairs) -> Namespace:
    """The namespace of own rows behind some entries: their KV depends on what they read, and on their positions."""
    content = msgspec.msgpack.encode((sorted(entry.namespace.entry for entry in entries), anchors))
    return namespace.for_entry("rows", hashlib.blake2b(content, digest_size=16).hexdigest())
