"""The `modules` strategy (Prompt Cache): requests read entries that were encoded alone, wherever these lie."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from radix import Namespace
from runtime.errors import InvalidRequest
from runtime.kv.segments import Run
from runtime.request import Request
from runtime.reuse.entries.entry import Entry, EntryMeta, Pairs, digest, read_anchors, read_fields, read_tokens
from runtime.reuse.entries.strategy import EntryStrategy, Imports
from runtime.reuse.modules.entry import ModuleFields, read_entry


@dataclass(slots=True)
class ModuleImports(Imports):
    """`schema`: its name, shown in the tree."""

    schema: str = ""


class Modules(EntryStrategy):
    """Modules are entries, and are read wherever their schema has placed them: own rows see all of them."""

    name = "modules"
    kind = "module"
    counted = ("encoded_modules",)

    def open(self, request: Request, asked: dict[str, Any]) -> None:
        """A request without tokens of its own only encodes."""
        layout = read_fields(ModuleFields, asked)
        entries = self._entries(layout, request.namespace)
        own, anchors = request.sequence, layout.anchors
        if request.sampler.prompt_logprobs_from is not None:
            raise InvalidRequest("prompts with modules have no log-probabilities", param="prompt_logprobs")
        if not own.tokens:
            anchors = self._probe(request, entries)
        read_tokens(own.tokens.tobytes(), self._model.vocab_size, "the prompt")
        own.anchors = read_anchors(anchors, len(own.tokens), self._model.context_length, "the prompt")
        request.reuse = ModuleImports(entries, schema=layout.schema)
        for entry in entries:
            request.entry_tokens.extend(entry.tokens)
        request.namespace = _own_namespace(request.namespace, entries, own.anchors)
        pages = sum(self.cache.pages_for(e.length) + self.cache.pages_for(e.num_holes) for e in entries)
        in_context = self._model.context_length - own.position(len(own.tokens)) + len(own.tokens)
        self._bound(request, pages, in_context)

    def _entries(self, layout: ModuleFields, namespace: Namespace) -> list[Entry]:
        self._check_count(len(layout.entries))
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
        request.prompt_len = request.max_length = 1
        return [(0, last.position(len(last.tokens) - 1))]

    def runs(self, tokens: array[int], namespace: Namespace, asked: dict[str, Any]) -> list[Run]:
        """One for each entry."""
        return [entry.run() for entry in self._entries(read_fields(ModuleFields, asked), namespace)]

    def _meta(self, request: Request, entry: Entry) -> EntryMeta:
        return EntryMeta(self.kind, entry.name, entry.length, {"schema": request.reuse.schema})

    def _describe(self, request: Request) -> dict[str, Any]:
        imports = request.reuse
        return {
            "exact": True,
            "modules": _names_of(imports.entries),
            "computed_modules": _names_of(imports.computed),
        }


def _names_of(entries: Iterable[Entry]) -> list[str]:
    """Names in the order of the entries' first kept rows."""
    first = {entry: entry.sequence.position(int(entry.is_kept.argmax())) for entry in entries}
    return [entry.name for entry in sorted(first, key=first.__getitem__)]


def _own_namespace(namespace: Namespace, entries: list[Entry], anchors: Pairs) -> Namespace:
    """The namespace of own rows behind some entries: their KV depends on what they read, and on their positions."""
    content = msgspec.msgpack.encode((sorted(entry.namespace.entry for entry in entries), anchors))
    return namespace.for_entry("rows", digest(content))
