"""`/v1/documents`: documents by account and content, held in the server's process. Their KV is in the tree."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from runtime.asks import DocumentMethod
from runtime.errors import InvalidRequest
from runtime.features.chunks.ask import shortest
from runtime.features.chunks.documents.prompt import Document, Segments, TokenizedPrompt
from runtime.frontend.output import PartedPrompt
from runtime.models.tokenizer import Tokenizer
from server.features.chunks.precompute import Precompute
from server.features.chunks.routes import object_router
from server.features.chunks.store import Store, StoredObject
from server.generation.bodies import Scoped
from server.http.body import Text, example

if TYPE_CHECKING:
    from runtime.features.chunks.documents.plan import DocumentPrompt

# Bytes of a document beside its text and tokens.
_BYTES = 1024

Title = Annotated[Text, Field(min_length=1, max_length=256, description="becomes the document's first line")]


class ChunkedKv(Scoped):
    """Options of the requests that will read a document's KV."""

    chunk_tokens: Annotated[int, Field(ge=16, le=4096, description="`chunk_tokens` of these requests")] = 512
    method: Annotated[
        DocumentMethod | None,
        Field(description="`method` of these requests, at first `--reuse`: `passages` has KV of its own, others share"),
    ] = None


@dataclass(kw_only=True)
class StoredDocument(StoredObject):
    """A document of an account.

    Attributes:
        document: title, text and tokens.
        alone: a prompt that consists of the document.
        method: of the requests that will read it, where these do not say.
    """

    document: Document
    alone: TokenizedPrompt
    method: str = ""

    def is_for(self, kv: ChunkedKv, default: str) -> None:
        self.method = kv.method or self.method or default

    def is_reused(self, kv: ChunkedKv) -> bool:
        return self.num_tokens >= shortest(kv.chunk_tokens)

    def encoding(self, kv: ChunkedKv) -> DocumentPrompt:
        from runtime.features.chunks.documents.plan import plan_encoding

        return plan_encoding(self.alone, kv.method or self.method, kv.chunk_tokens)

    def describe(self, now_s: float, live: Container[str]) -> dict[str, Any]:
        own = {"id": self.id, "object": "document", "title": self.document.title or None, "tokens": self.num_tokens}
        return own | super().describe(now_s, live)

    def details(self, prompt: PartedPrompt, cached: dict[str, int]) -> dict[str, Any]:
        if prompt.ask is None:
            return {"chunks": 0, "cached": 0}
        starts = range(0, self.num_tokens - prompt.ask.shortest + 1, prompt.ask.chunk_tokens)
        return {"chunks": len(starts), "cached": sum(cached.values())}


class DocumentRequest(Precompute, ChunkedKv):
    """A document. `encode` and `pin` compute KV for requests with the same salt, `chunk_tokens` and `method`."""

    model_config = example(title="Rome", text="Rome is old.")

    text: Annotated[Text, Field(min_length=1)]
    title: Title | None = None
    encode: bool = Field(True, description="compute the KV now; otherwise at its first use")

    def read(self, tokenizer: Tokenizer, context_length: int) -> StoredDocument:
        document, code = Document(self.text, self.title or ""), "context_length_exceeded"
        if document.num_characters > (most := context_length * tokenizer.longest_token):
            message = f"the document has {document.num_characters} characters; the model's context holds at most {most}"
            raise InvalidRequest(message, param="text", code=code)
        alone = Segments([document]).tokenize(tokenizer, add_special_tokens=False)
        if (count := len(alone.tokens)) >= context_length:
            message = f"the document has {count} tokens; the model's context is {context_length} tokens"
            raise InvalidRequest(message, param="text", code=code)
        return StoredDocument(
            id=document.id,
            digest=document.id,
            size=4 * (document.num_characters + count) + _BYTES,
            num_tokens=count,
            document=replace(document, tokens=alone.tokens),
            alone=alone,
        )


class DocumentStore(Store[StoredDocument]):
    """The documents of all accounts, with sizes in bytes."""

    noun, source = "document", "text"
    most, most_size = 4096, 1 << 26
    bounds = f"{most} documents in {most_size >> 20} MiB, where a character counts for 4 bytes and a token for 4 more"


router = object_router(DocumentStore, DocumentRequest, ChunkedKv)
