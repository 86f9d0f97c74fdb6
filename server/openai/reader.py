"""Reads answers while they arrive: reasoning, text, and calls of tools."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from server.openai.dialects.dialect import Calls, Dialect
from server.openai.dialects.json_objects import MARKERS, read_json
from server.openai.dialects.parameters import Schemas
from server.openai.dialects.tagged import TAGGED
from server.openai.dialects.tags import Closing, end_of_call

_CALL = '{"name":"'  # without white space


class AnswerParts(NamedTuple):
    """Parts of an answer that later text cannot change. `calls` are in OpenAI's form."""

    thought: str
    text: str
    calls: list[dict[str, Any]]


@dataclass(slots=True)
class CallReader:
    """Incremental parser of tool calls.

    Attributes:
        tools: the parameters of the tools that may be called, by name; calls of other tools remain text.
        forced: whether the whole text is one call in JSON.
        single: whether to drop all calls but the first.
        dialect: how the model writes calls.
        given_names: the request's names of tools that the model sees under other names.
    """

    tools: Schemas
    forced: bool = False
    single: bool = False
    dialect: Dialect = TAGGED
    given_names: Mapping[str, str] = field(default_factory=dict)
    num_calls: int = 0
    _held: str = field(default="", init=False)
    _plain: bool = field(default=False, init=False)
    _cut: bool = field(default=False, init=False)
    _follows_call: bool = field(default=False, init=False)
    _begins: bool = field(default=True, init=False)
    _closing: Closing = field(default_factory=Closing, init=False)

    def push(self, text: str, last: bool, cut: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Add text; returns the text that is final, and the calls in OpenAI's form.

        Args:
            last: whether no further text follows.
            cut: whether a limit has ended the text. Then a call that was being written is returned as far as it is.
        """
        if not self.tools:
            return text, []
        self._held += text
        self._cut = cut
        if self.dialect.tags and not self.forced:
            shown, found = self._between_tags(last)
        else:
            shown, found = self._whole(last)
        return shown, self.numbered(found)

    def numbered(self, found: Calls) -> list[dict[str, Any]]:
        """Calls in OpenAI's form."""
        calls = []
        for name, arguments in found[: max(1 - self.num_calls, 0)] if self.single else found:
            function = {"name": self.given_names.get(name, name), "arguments": arguments}
            call = {"index": self.num_calls, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            calls.append({**call, "function": function})
            self.num_calls += 1
        return calls

    def _untagged(self, last: bool) -> Calls | None:
        """The call of an answer that consists of one without tags; None as long as the answer may be one."""
        dense = "".join(self._held[:60].split())[: len(_CALL)]
        if not self.dialect.is_json or not _CALL.startswith(dense):
            return []
        return self._known(self.dialect.read(self._held, self.tools, self._cut)) if last and dense else None

    def _between_tags(self, last: bool) -> tuple[str, Calls]:
        shown, found = "", Calls()
        if self._begins:
            calls = self._untagged(last)
            if calls is None and not last:
                return "", []
            self._begins = False
            if calls:
                self._held = ""
                return "", calls
        if self._follows_call:
            self._held = self._held.lstrip("\n")
        while starts := [(at, tags) for tags in self.dialect.tags if (at := self._held.find(tags[0])) >= 0]:
            start, (opening, close) = min(starts)
            end = end_of_call(self._held, start + len(opening), close, search=self._closing) if close else -1
            if end < 0 and not last:
                break
            if end < 0 and close and not self._cut:
                end = self._held.find(close, start)
            self._closing = Closing()
            stop = end + len(close) if end >= 0 else len(self._held)
            calls = self._known(self.dialect.read(self._held[start:stop], self.tools, self._cut and end < 0))
            shown += self._held[:start].rstrip("\n") if calls else self._held[:stop]
            found += calls
            self._follows_call = bool(calls)
            self._held = self._held[stop:].lstrip("\n") if calls else self._held[stop:]
        keep = len(self._held) if last else self._settled()
        self._follows_call = self._follows_call and not keep
        shown, self._held = shown + self._held[:keep], self._held[keep:]
        return shown, found

    def _settled(self) -> int:
        """Length of the held text that is final: up to an opening tag, or to a possible beginning of one."""
        opens = [opening for opening, _ in self.dialect.tags]
        places = [self._held.find(one) if one in self._held else before_tag(self._held, one) for one in opens]
        return len(self._held[: min(places)].rstrip("\n"))

    def _whole(self, last: bool) -> tuple[str, Calls]:
        text = self._held.lstrip()
        starts = any(marker.startswith(text[: len(marker)]) for marker in MARKERS) or text[:1] in ("{", "[")
        if not last and not self._plain and (starts or not text):
            return "", []
        self._plain = True
        for marker in MARKERS:
            text = text.removeprefix(marker)
        shown, self._held = self._held, ""
        calls = self._known(read_json(text, self.tools, self._cut)) if starts else []
        return ("", calls) if calls else (shown, [])

    def _known(self, calls: Calls) -> Calls:
        """The calls; none if any of them is of an unknown tool."""
        return calls if all(name in self.tools for name, _ in calls) else []


@dataclass(slots=True)
class AnswerReader:
    """Incremental reader of an answer, whose reasoning stands between tags before all else.

    Attributes:
        calls: parser of the text behind the reasoning.
        state: where the answer stands; begins as `thought` if the prompt ends with the opening tag.
    """

    calls: CallReader
    state: Literal["start", "thought", "gap", "text"] = "start"
    _held: str = field(default="", init=False)
    _has_thought: bool = field(default=False, init=False)

    @property
    def num_calls(self) -> int:
        return self.calls.num_calls

    def push(self, text: str, last: bool, cut: bool = False) -> AnswerParts:
        """Add text; `last`, `cut`: see `CallReader.push`."""
        thought, said = self._split(text, last)
        return AnswerParts(thought, *self.calls.push(said, last, cut))

    def _split(self, text: str, last: bool) -> tuple[str, str]:
        """The new part of the reasoning, and the new text behind it."""
        thought, said = "", ""
        opening, closing = self.calls.dialect.thoughts
        self._held += text
        if self.state == "start":
            start = self._held.lstrip()
            if start.startswith(opening):
                self.state, self._held = "thought", start.removeprefix(opening)
            elif last or not opening.startswith(start):
                self.state = "text"
        if self.state == "thought":
            self._held = self._held if self._has_thought else self._held.lstrip()
            thought, found, behind = self._held.partition(closing)
            if found:
                self.state, self._held = "gap", behind
            else:
                settled = len(thought) if last else before_tag(thought, closing)
                thought, self._held = thought[:settled], thought[settled:]
            self._has_thought = self._has_thought or bool(thought)
        if self.state == "gap":
            self._held = self._held.lstrip("\n")
            self.state = "text" if self._held else "gap"
        if self.state == "text":
            said, self._held = self._held, ""
        return thought, said


def text_input(arguments: str) -> str:
    """The argument `input` of a custom tool's call, as far as it is; the whole text if it is missing."""
    try:
        given = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = given.get("input", "") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def before_tag(text: str, tag: str) -> int:
    """Length of the text without a beginning of the tag at its end."""
    return len(text) - next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
