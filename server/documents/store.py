"""Documents by account and content. They live in the server's process; their KV lives in the tree."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.errors import InvalidRequest
from runtime.models.tokenizer import Tokenizer
from runtime.reuse.fusion.plan import DocumentPrompt, plan_encoding
from runtime.reuse.fusion.prompt import Document, Segments, TokenizedPrompt
from server.store import Lease, Store

# Memory of a document beside its text and tokens, in bytes.
_BYTES = 1024


@dataclass(slots=True)
class StoredDocument:
    """A document of an account.

    Attributes:
        id: of its content.
        document: with its tokens.
        alone: the document as a prompt.
    """

    id: str
    document: Document
    alone: TokenizedPrompt
    lease: Lease = field(default_factory=Lease)

    @property
    def digest(self) -> str:
        return self.id

    @property
    def num_tokens(self) -> int:
        return len(self.alone.tokens)

    @property
    def size(self) -> int:
        """The memory that it takes, in bytes."""
        return 4 * (self.document.num_characters + self.num_tokens) + _BYTES

    def encoding(self, chunk_tokens: int) -> DocumentPrompt:
        """A prompt that only encodes the document."""
        return plan_encoding(self.alone, chunk_tokens)

    def describe(self, now_s: float, live: Container[str]) -> dict[str, Any]:
        """The document for clients; `live`: ids of the pins that the engine has."""
        return {
            "id": self.id,
            "object": "document",
            "title": self.document.title or None,
            "tokens": self.num_tokens,
            **self.lease.describe(now_s, live),
        }


def make(document: Document, tokenizer: Tokenizer, context_length: int) -> StoredDocument:
    """A document that is in no store yet. Raises InvalidRequest if it does not fit into the model's context."""
    code = "context_length_exceeded"
    if document.num_characters > (most := context_length * tokenizer.longest_token):
        message = f"the document has {document.num_characters} characters; the context's tokens stand for {most}"
        raise InvalidRequest(message, param="text", code=code)
    alone = Segments([document]).tokenize(tokenizer, add_special_tokens=False)
    if (count := len(alone.tokens)) >= context_length:
        message = f"the document has {count} tokens; the model's context is {context_length} tokens"
        raise InvalidRequest(message, param="text", code=code)
    return StoredDocument(document.id, replace(document, tokens=alone.tokens), alone)


class DocumentStore(Store[StoredDocument]):
    """The documents of all accounts."""

    noun, source = "document", "text"
    most, most_size = 4096, 1 << 26
    bounds = f"{most} documents in {most_size >> 20} MiB, where a character counts for 4 bytes and a token for 4 more"
