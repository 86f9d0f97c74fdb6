"""Prompts of `/generate` with documents or modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from runtime.features.chunks.documents.prompt import Segments
from runtime.frontend.output import Prompt, prompts_of
from server.features.chunks.given import MAX_SEGMENTS, GivenDocument
from server.features.chunks.schemas import SchemaStore
from server.features.parts import Stores
from server.http.body import Body, OneOrLists, OneOrMany, Text


class PromptPart(Body):
    """A part of a prompt: a text, or a document."""

    text: Text | None = None
    document: GivenDocument | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> PromptPart:
        if (self.text is None) == (self.document is None):
            raise ValueError("a segment is either a text or a document")
        return self

    @property
    def num_characters(self) -> int:
        """Without stored documents."""
        return len(self.text or "") + (self.document.num_characters if self.document else 0)


SegmentPrompts = OneOrLists[Annotated[list[PromptPart], Field(max_length=MAX_SEGMENTS)]]


class ChunkPrompts(Body):
    """The fields of `/generate` that hold prompts with documents or modules.

    Attributes:
        PROMPTS: names of the fields that hold prompts.
    """

    PROMPTS: ClassVar[tuple[str, ...]] = ("segments", "pml")

    pml: OneOrMany[Text] | None = Field(
        None, description="prompts in PML, which import modules of a schema: <prompt schema=...>"
    )
    segments: SegmentPrompts | None = Field(None, description="prompts of texts and documents, in order")

    def compiled(self, account: str, stores: Stores) -> tuple[list[Callable[[], Prompt]], list[int], bool] | None:
        """The prompts, the number of characters in each, whether they are a list; None if neither field is given."""
        if self.segments is not None:
            is_list = isinstance(self.segments[0], list) if self.segments else True
            several: list[Any] = self.segments if is_list else [self.segments]
            characters = [sum(segment.num_characters for segment in segments) for segments in several]
            return [partial(_compile, segments, account, stores) for segments in several], characters, is_list
        if self.pml is not None:
            texts, is_list = prompts_of(self.pml)
            compiled = [partial(stores[SchemaStore].compile, account, str(text)) for text in texts]
            return list(compiled), [len(str(text)) for text in texts], is_list
        return None


def _compile(segments: list[PromptPart], account: str, stores: Stores) -> Segments:
    """A prompt; thread-safe. Raises NotFound for unknown documents."""
    return Segments([one.document.found(account, stores) if one.document else one.text or "" for one in segments])
