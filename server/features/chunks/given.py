"""Documents in requests."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from runtime.features.chunks.documents.prompt import Document
from server.features.chunks.documents import DocumentStore, Title
from server.features.parts import Stores
from server.http.body import Body, Text

# Most texts and documents in a prompt.
MAX_SEGMENTS = 4096


class GivenDocument(Body):
    """A document in a request: its text, or the id of a stored document."""

    text: Annotated[Text, Field(min_length=1)] | None = None
    title: Title | None = None
    id: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        None, description="id of a document that was stored by POST /v1/documents"
    )

    @model_validator(mode="after")
    def _text_or_id(self) -> GivenDocument:
        if (self.text is None) == (self.id is None):
            raise ValueError("a document has either text or id")
        if self.id is not None and self.title is not None:
            raise ValueError("a document with an id takes no title: the stored title is used")
        return self

    @property
    def num_characters(self) -> int:
        return len(self.text or "")

    def found(self, account: str, stores: Stores) -> Document:
        """The document; thread-safe. Raises NotFound."""
        if self.id is not None:
            return stores[DocumentStore].get(account, self.id).document
        return Document(self.text or "", self.title or "")


GivenDocuments = Annotated[list[GivenDocument], Field(max_length=MAX_SEGMENTS)]
