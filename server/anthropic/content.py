"""Splits the model's text into Anthropic's content blocks: reasoning, text, tool calls."""

import json
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from runtime.sampling.json_text import parse_json
from server.openai.calls import CallReader, before_tag

_OPEN, _CLOSE = "<think>", "</think>"


class Piece(NamedTuple):
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
            return self.start() | {"input": from_json(self.text or "{}", allow_partial=True)}
        return self.start() | {self.type: self.text}


@dataclass(slots=True)
class ContentReader:
    """Incremental reader of an answer.

    Attributes:
        calls: parser of the text behind the reasoning.
        state: where the answer stands; begins as `thinking` if the prompt ends with `<think>`.
    """

    calls: CallReader
    state: Literal["start", "thinking", "gap", "text"] = "start"
    _held: str = field(default="", init=False)
    _has_thought: bool = field(default=False, init=False)

    def push(self, text: str, last: bool, cut: bool = False) -> list[Piece]:
        """Add text; returns the pieces that later text cannot change. `last`, `cut`: see `CallReader.push`."""
        thought, said = self._split(text, last)
        shown, calls = self.calls.push(said, last, cut)
        pieces = [Piece(kind, part) for kind, part in (("thinking", thought), ("text", shown)) if part]
        return pieces + [_call(**call["function"], cut=cut and call is calls[-1]) for call in calls]

    def _split(self, text: str, last: bool) -> tuple[str, str]:
        """The new part of the reasoning, and the new text behind it."""
        thought, said = "", ""
        self._held += text
        if self.state == "start":
            start = self._held.lstrip()
            if start.startswith(_OPEN):
                self.state, self._held = "thinking", start.removeprefix(_OPEN)
            elif last or not _OPEN.startswith(start):
                self.state = "text"
        if self.state == "thinking":
            self._held = self._held if self._has_thought else self._held.lstrip()
            thought, found, behind = self._held.partition(_CLOSE)
            if found:
                self.state, self._held = "gap", behind
            else:
                settled = len(thought) if last else before_tag(thought, _CLOSE)
                thought, self._held = thought[:settled], thought[settled:]
            self._has_thought = self._has_thought or bool(thought)
        if self.state == "gap":
            self._held = self._held.lstrip("\n")
            self.state = "text" if self._held else "gap"
        if self.state == "text":
            said, self._held = self._held, ""
        return thought, said


def _call(name: str, arguments: str, cut: bool) -> Piece:
    """A call. Arguments that are no JSON object become `{"arguments": ...}`, unless they are `cut`."""
    try:
        given = parse_json(arguments or "{}")
    except ValueError:
        given = arguments
    text = json.dumps(given if isinstance(given, dict) else {"arguments": given}, ensure_ascii=False)
    is_begun = cut and not isinstance(given, dict) and arguments[:1] in ("", "{")
    return Piece("tool_use", arguments if is_begun else text, f"toolu_{uuid.uuid4().hex[:24]}", name)
