"""The parts of a rendered conversation: tools, system message, messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from runtime.errors import InvalidRequest
from runtime.models.marks import new_mark

Kind = Literal["tools", "system", "message", "prompt"]
# Characters of the template's own text that identify a description of tools.
_TELLING = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a prompt from character `start` on; `index`: of the message in the request."""

    kind: Kind
    start: int = 0
    index: int | None = None

    def __str__(self) -> str:
        """For messages."""
        names = {"tools": "the tools", "system": "the system prompt", "prompt": "the prompt"}
        return names.get(self.kind, f"message {self.index}")


@dataclass(slots=True)
class Conversation:
    """Messages and tools, and the template that renders them.

    Attributes:
        render: the text of messages (with plain contents) and tools.
        turns: the chat template's dicts.
        tools: as `render` takes them.
        example: any tool, to find where tools would be described.
        numbers: index of the request's message for each turn; None: turns are messages.
    """

    render: Callable[[list[dict[str, Any]], list[Any]], str]
    turns: list[dict[str, Any]]
    tools: list[Any]
    example: Any
    numbers: Sequence[int] | None = None
    _marked: list[int] = field(init=False)
    _marks: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._marked = [i for i, turn in enumerate(self.turns) if turn["content"]]
        self._marks = [new_mark() for _ in self._marked]

    def parts(self, text: str) -> list[Part]:
        """The parts of the conversation's text, in order; none if its template changes contents.

        The template's own text belongs to the next content, and after the last content to that one.
        """
        pieces = self._pieces(self.turns, self.tools)
        if pieces is None:
            return []
        silent = [{name: value for name, value in turn.items() if name != "tool_calls"} for turn in self.turns]
        calls = self._added(pieces, silent, self.tools) if silent != self.turns else {}
        tools = dict([*self._added(pieces, self.turns, []).items()][:1]) if self.tools else {}
        found, at = [Part("system")], 0
        for place, piece in enumerate(pieces):
            start = text.find(piece, at) if piece else at
            if start < 0:
                break
            next_part = self._part(place) if place else found[0]
            added = [(*tools[place], Part("tools"))] if place in tools else []
            added += [(*calls[place], self._caller(place))] if place in calls else []
            if place and not any(first == 0 for first, _, _ in added):
                # The other prompt's content may continue where this one ends.
                found.append(replace(next_part, start=start + min(1, len(piece))))
            for first, stop, part in added:
                found += [replace(part, start=start + first), replace(next_part, start=start + stop)]
            at = start + len(piece)
            if place < len(self._marked):
                content = self.turns[self._marked[place]]["content"]
                found.append(replace(self._part(place), start=at))
                at += len(content) if text.startswith(content, at) else len(content.strip())
        return found

    def describes_tools(self, other: str) -> bool:
        """Whether `other`, after the same beginning, describes tools that this conversation lacks."""
        bare = self._pieces(self.turns, [])
        shown = self._pieces(self.turns, [self.example])
        if self.tools or bare is None or shown is None:
            return False
        for without, with_ in zip(bare, shown, strict=True):
            if without != with_:
                start, at = common_characters(without, with_), with_.find(other[:_TELLING])
                return len(other) >= _TELLING and 0 <= at <= start < at + _TELLING
        return False

    def _part(self, place: int) -> Part:
        """The part of a content; a place after the last content belongs to that one."""
        index = self._marked[min(place, len(self._marked) - 1)]
        leading = all(turn["role"] == "system" for turn in self.turns[: index + 1])
        return Part("system") if leading else self._message(index)

    def _message(self, turn: int) -> Part:
        return Part("message", index=turn if self.numbers is None else self.numbers[turn])

    def _caller(self, place: int) -> Part:
        """The last message with calls before a place."""
        stop = self._marked[place] if place < len(self._marked) else len(self.turns)
        return self._message(max((i for i in range(stop) if self.turns[i].get("tool_calls")), default=0))

    def _pieces(self, turns: Sequence[dict[str, Any]], tools: list[Any]) -> list[str] | None:
        """The template's text around the contents; None if it changes them."""
        marks = dict(zip(self._marked, self._marks, strict=True))
        shown = [{**turn, "content": marks.get(i, turn["content"])} for i, turn in enumerate(turns)]
        try:
            text = self.render(shown, tools)
        except InvalidRequest:
            return None
        pieces, at = [], 0
        for mark in self._marks:
            if (found := text.find(mark, at)) < 0:
                return None
            pieces.append(text[at:found])
            at = found + len(mark)
        return [*pieces, text[at:]]

    def _added(
        self, pieces: list[str], turns: Sequence[dict[str, Any]], tools: list[Any]
    ) -> dict[int, tuple[int, int]]:
        """Spans of pieces that are missing with other turns or tools, by place."""
        fewer = self._pieces(turns, tools)
        spans = {}
        for place, (piece, less) in enumerate(zip(pieces, fewer or pieces, strict=True)):
            if piece != less:
                start = common_characters(piece, less)
                end = common_characters(piece[start:][::-1], less[start:][::-1])
                spans[place] = (start, len(piece) - end)
        return spans


def common_characters(one: str, other: str) -> int:
    """The number of shared leading characters."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def part_at(parts: list[Part], character: int) -> Part:
    """The part that contains a character of the text."""
    before = [part for part in parts if part.start <= character]
    return before[-1] if before else Part("prompt")
