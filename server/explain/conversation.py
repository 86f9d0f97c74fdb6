"""Maps the characters of a rendered conversation to its tools, system message and messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from runtime.errors import InvalidRequest
from runtime.models.marks import new_mark

Kind = Literal["tools", "system", "message", "prompt"]
# Number of characters of template text by which a description of tools is recognised.
_TELLING = 8


@dataclass(frozen=True, slots=True)
class PromptSection:
    """A section of a prompt that begins at character `start`; `index`: the message's index in the request."""

    kind: Kind
    start: int = 0
    index: int | None = None

    def __str__(self) -> str:
        """The section's name in explanations, which count messages from 1."""
        names = {"tools": "the tools", "system": "the system prompt", "prompt": "the prompt"}
        return f"message {self.index + 1}" if self.index is not None else names[self.kind]


@dataclass(slots=True)
class Conversation:
    """Messages and tools, with the function that renders them.

    Attributes:
        render: makes the prompt's text from turns, whose contents are strings, and tools.
        turns: the messages as dicts for the chat template.
        tools: the tools as `render` takes them.
        example: any tool; rendering it shows where the template describes tools.
        numbers: for each turn, the index of its message in the request; None: turns are messages.
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

    def sections(self, text: str) -> list[PromptSection]:
        """The sections of the conversation's text, in order; empty if the chat template changes contents.

        Text of the template belongs to the content that follows, and behind the last content to the last content.
        """
        pieces = self._pieces(self.turns, self.tools)
        if pieces is None:
            return []
        silent = [{name: value for name, value in turn.items() if name != "tool_calls"} for turn in self.turns]
        calls = self._added(pieces, silent, self.tools) if silent != self.turns else {}
        tools = dict([*self._added(pieces, self.turns, []).items()][:1]) if self.tools else {}
        found, at = [PromptSection("system")], 0
        for place, piece in enumerate(pieces):
            start = text.find(piece, at) if piece else at
            if start < 0:
                break
            following = self._section(place) if place else found[0]
            added = [(*tools[place], PromptSection("tools"))] if place in tools else []
            added += [(*calls[place], self._caller(place))] if place in calls else []
            if place and not any(first == 0 for first, _, _ in added):
                # One character later: where this content ends, the other prompt's content may continue.
                found.append(replace(following, start=start + min(1, len(piece))))
            for first, stop, section in added:
                found += [replace(section, start=start + first), replace(following, start=start + stop)]
            at = start + len(piece)
            if place < len(self._marked):
                content = self.turns[self._marked[place]]["content"]
                found.append(replace(self._section(place), start=at))
                at += len(content) if text.startswith(content, at) else len(content.strip())
        return found

    def describes_tools(self, other: str) -> bool:
        """Whether `other`, the rest of a prompt with the same beginning, describes tools that this one lacks."""
        bare = self._pieces(self.turns, [])
        shown = self._pieces(self.turns, [self.example])
        if self.tools or bare is None or shown is None:
            return False
        for without, with_ in zip(bare, shown, strict=True):
            if without != with_:
                start, at = common_characters(without, with_), with_.find(other[:_TELLING])
                return len(other) >= _TELLING and 0 <= at <= start < at + _TELLING
        return False

    def _section(self, place: int) -> PromptSection:
        """The section of content number `place`; a place behind the last content belongs to the last content."""
        index = self._marked[min(place, len(self._marked) - 1)]
        leading = all(turn["role"] == "system" for turn in self.turns[: index + 1])
        return PromptSection("system") if leading else self._message(index)

    def _message(self, turn: int) -> PromptSection:
        return PromptSection("message", index=turn if self.numbers is None else self.numbers[turn])

    def _caller(self, place: int) -> PromptSection:
        """The last message with tool calls before content number `place`."""
        stop = self._marked[place] if place < len(self._marked) else len(self.turns)
        return self._message(max((i for i in range(stop) if self.turns[i].get("tool_calls")), default=0))

    def _pieces(self, turns: Sequence[dict[str, Any]], tools: list[Any]) -> list[str] | None:
        """The template's text before, between and behind the contents; None if it changes contents."""
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
        """By place, the span (start, stop) of a piece that is absent when other turns or tools are rendered."""
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


def section_at(sections: list[PromptSection], character: int) -> PromptSection:
    """The section that contains the given character."""
    before = [section for section in sections if section.start <= character]
    return before[-1] if before else PromptSection("prompt")
