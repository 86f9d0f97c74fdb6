"""Prompts and chat messages with documents. Each document is tokenized alone."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from runtime.errors import InvalidRequest
from runtime.frontend.output import UnplacedPrompt
from runtime.models.marks import cut, new_mark
from runtime.models.tokenizer import Tokenizer

# Most documents in one prompt: a waiting request looks up each of them.
MAX_DOCUMENTS = 512
# Some methods read documents encoded behind this text: no document then looks like the beginning of everything.
_LEAD = (
    "The lighthouse at the northern end of the bay was built of grey stone. It stands about thirty metres high, and "
    "its lamp can be seen from far out at sea. A keeper lived there with his family until the light became automatic.\n"
    "Copper was among the first metals that people worked. It is soft enough to be hammered into tools, and it can be "
    "melted in a simple furnace. Mixed with tin it gives bronze, which is much harder, so that swords and bells were "
    "made of it.\n"
)
# Names the lead in tables of measurements.
LEAD_ID = hashlib.sha256(_LEAD.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class Document:
    """A text whose KV other prompts can reuse at any position.

    Attributes:
        title: first line of the document; empty: none.
        tokens: int32 ids of `content`, if they are known.
    """

    text: str
    title: str = ""
    tokens: array[int] | None = field(default=None, repr=False, compare=False)

    @property
    def content(self) -> str:
        return f"{self.title}\n{self.text}" if self.title else self.text

    @property
    def id(self) -> str:
        """An id made from title and text: equal documents have equal ids."""
        return f"doc-{hashlib.sha256(json.dumps([self.title, self.text]).encode()).hexdigest()[:32]}"

    @property
    def num_characters(self) -> int:
        return len(self.title) + len(self.text) + 1


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt of texts and documents as tokens.

    Attributes:
        tokens: int32 ids of the whole prompt.
        documents: index ranges [start, stop) of the documents in `tokens`, ascending.
        names: names of the documents, shown in answers.
        lead: see `ChunksAsk.lead`, int32; empty: documents are encoded alone.
    """

    tokens: array[int]
    documents: list[tuple[int, int]]
    names: list[str]
    lead: array[int] = field(default_factory=lambda: array("i"))


@dataclass(frozen=True, slots=True)
class Segments(UnplacedPrompt):
    """A prompt of texts and documents.

    >>> Segments(["Read this.\\n", Document("Rome is old."), "\\nHow old is Rome?"])
    """

    noun: ClassVar[str] = "documents"

    parts: Sequence[str | Document]

    @property
    def num_characters(self) -> int:
        return sum(len(part) if isinstance(part, str) else part.num_characters for part in self.parts)

    def tokenize(self, tokenizer: Tokenizer, add_special_tokens: bool = True) -> TokenizedPrompt:
        """Tokenize each document alone, and the text between two documents as one.

        Raises:
            InvalidRequest: if there are too many documents, or a document has no tokens.
        """
        runs: list[str | Document] = []
        for part in self.parts:
            if isinstance(part, str) and runs and isinstance(runs[-1], str):
                runs[-1] += part
            else:
                runs.append(part)
        documents = [run for run in runs if isinstance(run, Document)]
        if len(documents) > MAX_DOCUMENTS:
            message = f"the prompt has {len(documents)} documents; the limit is {MAX_DOCUMENTS}"
            raise InvalidRequest(message, param="prompt", code="too_many_documents")
        texts = [run if isinstance(run, str) else run.content for run in runs if not _tokens(run)]
        fresh = iter(tokenizer.encode_each(texts))
        tokens = array("i", tokenizer.leading_ids if add_special_tokens else ())
        ranges = []
        for run in runs:
            start = len(tokens)
            tokens.extend(_tokens(run) or next(fresh))
            if isinstance(run, Document):
                ranges.append((start, len(tokens)))
        for document, (start, stop) in zip(documents, ranges, strict=True):
            if start == stop:
                raise InvalidRequest(f"the document {document.title!r} has no tokens", param="prompt")
        names = [document.title or document.id for document in documents]
        return TokenizedPrompt(tokens, ranges, names, lead_of(tokenizer) if documents else array("i"))


@lru_cache(maxsize=4)
def lead_of(tokenizer: Tokenizer) -> array[int]:
    """The lead of all documents, int32; see `ChunksAsk.lead`."""
    return array("i", tokenizer.encode(_LEAD, add_special_tokens=False))


def _tokens(run: str | Document) -> array[int] | None:
    return run.tokens if isinstance(run, Document) else None


def in_messages(messages: Sequence[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> str | Segments:
    """The prompt of a conversation; plain text if the conversation has no documents.

    Args:
        messages: for the chat template; a content may be a list of texts and documents, joined by line breaks.
        render: applies the chat template to messages whose contents are texts.

    Raises:
        InvalidRequest: if the template would change or leave out documents.
    """
    documents: dict[str, Document] = {}

    def shown(part: str | Document) -> str:
        if isinstance(part, str):
            return part
        mark = new_mark()
        documents[mark] = part
        return mark

    def plain(message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        return message if isinstance(content, str) else {**message, "content": "\n".join(map(shown, content))}

    text = render([plain(message) for message in messages])
    pieces = cut(text, list(documents))
    if pieces is None:
        reason = "this model's chat template changes documents, or leaves them out, or writes them in another order"
        raise InvalidRequest(reason, param="prompt")
    if not documents:
        return text
    parts: list[str | Document] = [pieces[0]]
    for document, piece in zip(documents.values(), pieces[1:], strict=True):
        parts += [document, piece]
    return Segments(parts)
