"""`/v1/documents`: documents by account and content, in the server's process; their KV lives in the tree."""

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from runtime.errors import InvalidRequest
from runtime.frontend.documents.plan import DocumentPrompt, plan_encoding
from runtime.frontend.documents.prompt import Document, Segments, TokenizedPrompt
from runtime.frontend.output import PlacedPrompt
from runtime.models.tokenizer import Tokenizer
from server.generation.bodies import Scoped
from server.http.context import provided
from server.http.wire import Text, example
from server.objects.precompute import Precompute
from server.objects.routes import object_router
from server.objects.store import Store, Stored

# Memory of a document beside its text and tokens, in bytes.
_BYTES = 1024

Title = Annotated[Text, Field(min_length=1, max_length=256, description="the first line of the document")]


class ChunkedKv(Scoped):
    """The requests that will read a document."""

    chunk_tokens: Annotated[int, Field(ge=16, le=4096, description="`chunk_tokens` of these requests")] = 512


@dataclass(kw_only=True)
class StoredDocument(Stored):
    """A document of an account.

    Attributes:
        document: with its tokens.
        alone: the document as a prompt.
    """

    document: Document
    alone: TokenizedPrompt

    def encoding(self, kv: ChunkedKv) -> DocumentPrompt:
        return plan_encoding(self.alone, kv.chunk_tokens)

    def describe(self, now_s: float, live: Container[str]) -> dict[str, Any]:
        own = {"id": self.id, "object": "document", "title": self.document.title or None, "tokens": self.num_tokens}
        return own | super().describe(now_s, live)

    def details(self, prompt: PlacedPrompt, cached: dict[str, int]) -> dict[str, Any]:
        assert prompt.reuse is not None
        return {"chunks": -(-self.num_tokens // prompt.reuse["chunk_tokens"]), "cached": sum(cached.values())}


class DocumentRequest(Precompute, ChunkedKv):
    """A document. `encode` and `pin` compute its KV now, for requests with the same salt and `chunk_tokens`."""

    model_config = example(title="Rome", text="Rome is old.")

    text: Annotated[Text, Field(min_length=1)]
    title: Title | None = None
    encode: bool = Field(True, description="compute the KV now; else at its first use")

    def read(self, tokenizer: Tokenizer, context_length: int) -> StoredDocument:
        document, code = Document(self.text, self.title or ""), "context_length_exceeded"
        if document.num_characters > (most := context_length * tokenizer.longest_token):
            message = f"the document has {document.num_characters} characters; the context's tokens stand for {most}"
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
    """The documents of all accounts; their sizes are in bytes."""

    noun, source = "document", "text"
    most, most_size = 4096, 1 << 26
    bounds = f"{most} documents in {most_size >> 20} MiB, where a character counts for 4 bytes and a token for 4 more"


Documents = Annotated[DocumentStore, provided(DocumentStore)]
router = object_router(DocumentStore, DocumentRequest, ChunkedKv)
