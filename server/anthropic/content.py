"""Anthropic's content blocks: reasoning, text, tool calls."""

import json
import uuid
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple

from pydantic_core import from_json

from runtime.json_text import parse_json
from server.openai.reader import AnswerParts


class ContentPiece(NamedTuple):
    """A whole tool call, or the next part of a text or reasoning block."""

    type: str
    text: str
    id: str = ""
    name: str = ""

    def start(self) -> dict[str, Any]:
        """The block for `content_block_start`, still empty."""
        if self.type == "tool_use":
            return {"type": "tool_use", "id": self.id, "name": self.name, "input": {}}
        # The signature is empty, because this server signs no reasoning.
        return {"type": self.type, self.type: ""} | ({"signature": ""} if self.type == "thinking" else {})

    def delta(self) -> dict[str, str]:
        """The `delta` of `content_block_delta`."""
        if self.type == "tool_use":
            return {"type": "input_json_delta", "partial_json": self.text}
        return {"type": f"{self.type}_delta", self.type: self.text}

    def block(self) -> dict[str, Any]:
        """The complete block, if this piece is all of it."""
        if self.type == "tool_use":
            try:
                given = from_json(self.text or "{}", allow_partial=True, allow_inf_nan=False)
            except ValueError:  # the beginning of a call that is no JSON
                given = {"arguments": self.text}
            return self.start() | {"input": given}
        return self.start() | {self.type: self.text}


def pieces_of(said: AnswerParts, cut: bool) -> list[ContentPiece]:
    """The parts of an answer as pieces; `cut`: whether a limit has ended it."""
    thought, shown, calls = said
    pieces = [ContentPiece(kind, part) for kind, part in (("thinking", thought), ("text", shown)) if part]
    return pieces + [_call(**call["function"], cut=cut and call is calls[-1]) for call in calls]


def joined(pieces: Iterable[ContentPiece]) -> list[ContentPiece]:
    """The pieces of an answer with one piece for each block."""
    groups = groupby(enumerate(pieces), lambda one: (one[1].type, one[0] if one[1].type == "tool_use" else 0))
    blocks = [[piece for _, piece in group] for _, group in groups]
    return [block[0]._replace(text="".join(piece.text for piece in block)) for block in blocks]


def _call(name: str, arguments: str, cut: bool) -> ContentPiece:
    """A call. Arguments that are no JSON object become `{"arguments": ...}`, unless they are `cut`."""
    try:
        given = parse_json(arguments or "{}")
    except ValueError:
        given = arguments
    text = json.dumps(given if isinstance(given, dict) else {"arguments": given}, ensure_ascii=False)
    is_begun = cut and not isinstance(given, dict) and arguments[:1] in ("", "{")
    return ContentPiece("tool_use", arguments if is_begun else text, f"toolu_{uuid.uuid4().hex[:24]}", name)
