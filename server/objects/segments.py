"""Documents in request bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from runtime.features.chunks.documents.prompt import Document, Segments
from server.http.wire import Body, OneOrLists, Text
from server.objects.documents import DocumentStore, Title

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


GivenDocuments = Annotated[list[GivenDocument], Field(max_length=MAX_SEGMENTS)]


class Segment(Body):
    """A part of a prompt: a text, or a document."""

    text: Text | None = None
    document: GivenDocument | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Segment:
        if (self.text is None) == (self.document is None):
            raise ValueError("a segment is either a text or a document")
        return self


SegmentPrompts = OneOrLists[Annotated[list[Segment], Field(max_length=MAX_SEGMENTS)]]


def count_characters(segments: list[Segment]) -> int:
    """The number of characters in a prompt, without its stored documents."""
    return sum(len(one.text or "") + (one.document.num_characters if one.document else 0) for one in segments)


def compile_segments(segments: list[Segment], account: str, store: DocumentStore) -> Segments:
    """The prompt of a request; thread-safe. Raises NotFound for unknown documents."""
    return Segments(_found([one.document or one.text or "" for one in segments], account, store))


def find_documents(turns: list[dict[str, Any]], account: str, store: DocumentStore) -> list[dict[str, Any]]:
    """Messages with `Document`s in place of the request's documents; thread-safe. Raises NotFound."""
    return [
        turn if isinstance(turn["content"], str) else {**turn, "content": _found(turn["content"], account, store)}
        for turn in turns
    ]


def _found(parts: Sequence[str | GivenDocument], account: str, store: DocumentStore) -> list[str | Document]:
    return [part if isinstance(part, str) else _find(part, account, store) for part in parts]


def _find(given: GivenDocument, account: str, store: DocumentStore) -> Document:
    if given.id is not None:
        return store.get(account, given.id).document
    return Document(given.text or "", given.title or "")
