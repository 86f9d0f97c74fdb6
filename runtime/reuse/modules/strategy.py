"""The `modules` strategy (Prompt Cache): requests read entries that were encoded alone, at fixed positions."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec
import numpy as np

from radix import Namespace
from runtime.asks import EntryAsk, ModulesAsk, ModulesReport, Pairs
from runtime.errors import InvalidRequest
from runtime.kv.segments import Run, Sequence
from runtime.protocol import ModelInfo
from runtime.request import Request
from runtime.reuse.entries.entry import Entry, EntryMeta, digest, read_anchors, read_tokens
from runtime.reuse.entries.strategy import EntryLease, EntryStrategy, Imports


class ModulesLease(EntryLease):
    """`schema`: the schema's name, shown in the tree."""

    def __init__(self, strategy: Modules, request: Request, entries: list[Entry], schema: str):
        super().__init__(strategy, request, Imports(entries))
        self.schema = schema

    def _meta(self, entry: Entry) -> EntryMeta:
        return EntryMeta(self.strategy.kind, entry.name, entry.length, {"schema": self.schema})

    def _report(self, reused: int, computed: int) -> ModulesReport:
        imports = self.imports
        return ModulesReport(
            modules=_names_of(imports.entries),
            computed_modules=_names_of(imports.computed),
            reused_tokens=reused,
            computed_tokens=computed,
        )


class Modules(EntryStrategy[ModulesAsk]):
    """Modules are entries at positions that their schema fixes. Own rows see all of a request's modules."""

    name = "modules"
    kind = "module"
    counted = ("encoded_modules",)

    def open(self, request: Request, ask: ModulesAsk) -> ModulesLease:
        """Read and check the message. A request without own tokens only encodes its modules."""
        entries = self._entries(ask, request.namespace)
        own, anchors = request.sequence, ask.anchors
        if request.sampler.prompt_logprobs_from is not None:
            raise InvalidRequest("prompts with modules have no log-probabilities", param="prompt_logprobs")
        if not own.tokens:
            anchors = self._probe(request, entries)
        read_tokens(own.tokens.tobytes(), self._model.vocab_size, "the prompt")
        own.anchors = read_anchors(anchors, len(own.tokens), self._model.context_length, "the prompt")
        for entry in entries:
            request.entry_tokens.extend(entry.tokens)
        request.namespace = _own_namespace(request.namespace, entries, own.anchors)
        pages = sum(self.cache.pages_for(e.length) + self.cache.pages_for(e.num_holes) for e in entries)
        in_context = self._model.context_length - own.position(len(own.tokens)) + len(own.tokens)
        self._bound(request, pages, in_context)
        return ModulesLease(self, request, entries, ask.schema)

    def _entries(self, ask: ModulesAsk, namespace: Namespace) -> list[Entry]:
        self._check_count(len(ask.entries))
        found: dict[Namespace, Entry] = {}
        for fields in ask.entries:
            entry = read_entry(fields, namespace, self._model)
            if entry is not None and found.setdefault(entry.namespace, entry) is not entry:
                raise InvalidRequest(f"entry {entry.name!r} is imported twice", param="reuse")
        # One order in all requests, longest first, so that requests with the same modules are neighbours in a step.
        return sorted(found.values(), key=lambda entry: (-entry.length, entry.namespace))

    def _probe(self, request: Request, entries: list[Entry]) -> Pairs:
        """Give a request without tokens one token, whose logits show whether the entries are finite; its anchors."""
        if not entries or request.wants_tokens:
            raise InvalidRequest("the prompt has no tokens of its own", param="prompt")
        last = entries[-1].sequence
        request.sequence.tokens.append(last.tokens[-1])
        request.prompt_len = request.max_length = 1
        return [(0, last.position(len(last.tokens) - 1))]

    def runs(self, tokens: array[int], namespace: Namespace, ask: ModulesAsk | None = None) -> list[Run]:
        """One run for each entry."""
        assert ask is not None
        return [entry.run() for entry in self._entries(ask, namespace)]


def read_entry(fields: EntryAsk, namespace: Namespace, model: ModelInfo) -> Entry | None:
    """The entry that a message describes; None if it consists of holes only. Raises InvalidRequest."""
    what = f"entry {fields.name!r}"
    tokens = read_tokens(fields.tokens, model.vocab_size, what)
    is_kept = np.ones(len(tokens), dtype=bool)
    for start, stop in fields.holes:
        is_kept[start:stop] = False
    if not is_kept.any():
        return None
    anchors = read_anchors(fields.anchors, len(tokens), model.context_length, what)
    content = msgspec.msgpack.encode((fields.tokens, anchors, is_kept.tobytes()))
    own = namespace.for_entry("module", digest(content))
    return Entry(fields.name, Sequence(tokens, anchors=anchors), is_kept, own, model.page_size)


def _names_of(entries: Iterable[Entry]) -> list[str]:
    """Names in the order of the entries' first kept rows."""
    first = {entry: entry.sequence.position(int(entry.is_kept.argmax())) for entry in entries}
    return [entry.name for entry in sorted(first, key=first.__getitem__)]


def _own_namespace(namespace: Namespace, entries: list[Entry], anchors: Pairs) -> Namespace:
    """The namespace of own rows, whose KV depends on the entries that they read and on their positions."""
    content = msgspec.msgpack.encode((sorted(entry.namespace.entry for entry in entries), anchors))
    return namespace.for_entry("rows", digest(content))
