"""Harmony, the form of gpt-oss's answers: messages with a channel, and for calls with a recipient."""

import re
from dataclasses import dataclass, field
from typing import Literal

from server.openai.reader import AnswerParts, CallReader, before_tag

_BODY = "<|message|>"
# Headers of the answer's text; the second one announces JSON.
FINALS = (f"<|channel|>final{_BODY}", f"<|channel|>final <|constrain|>json{_BODY}")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
# What an answer may begin with, behind the prompt's `<|start|>assistant`.
_BEGINNINGS = ("<|channel|>", " to=", "<|start|>", _BODY)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


@dataclass(slots=True)
class HarmonyReader:
    """Incremental reader of an answer, with the methods of `AnswerReader`.

    The channel `analysis` is reasoning, messages to offered functions are calls, and all others are text. An answer
    that does not begin with a header is text, or what `calls` finds in it: a format has forced it.

    Attributes:
        separates: whether reasoning is no part of the text.
    """

    calls: CallReader
    separates: bool = True
    _place: Literal["start", "header", "body", "plain"] = field(default="start", init=False)
    _channel: str = field(default="", init=False)
    _recipient: str = field(default="", init=False)
    _arguments: str = field(default="", init=False)
    _held: str = field(default="", init=False)
    _is_new: bool = field(default=True, init=False)
    _written: set[bool] = field(default_factory=set, init=False)

    @property
    def num_calls(self) -> int:
        return self.calls.num_calls

    def push(self, text: str, last: bool, cut: bool = False) -> AnswerParts:
        """Add text; `last`, `cut`: see `CallReader.push`."""
        self._held += text
        if self._place == "start" and (last or not any(one.startswith(self._held) for one in _BEGINNINGS)):
            self._place = "header" if self._held.startswith(_BEGINNINGS) else "plain"
        if self._place == "start":
            return AnswerParts("", "", [])
        if self._place == "plain":
            text, self._held = self._held, ""
            return AnswerParts("", *self.calls.push(text, last, cut))
        said = AnswerParts("", "", [])
        while self._place == "body" or self._read_header():
            ends = [(at, mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0]
            end, mark = min(ends, default=(len(self._held), ""))
            settled = end if ends or last else min(before_tag(self._held, one) for one in _ENDS)
            part, self._held = self._held[:settled], self._held[settled + len(mark) :]
            is_whole = bool(ends) or last
            said = self._add(said, part, is_whole)
            if not ends:
                break
            self._place = "header"
        return said

    def _read_header(self) -> bool:
        """Read a message's header; returns whether it is complete."""
        header, found, behind = self._held.partition(_BODY)
        if found:
            channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
            self._channel = channel[1] if channel else "final"
            self._recipient = recipient[1] if recipient and recipient[1] in self.calls.tools else ""
            self._place, self._held, self._is_new = "body", behind, True
        return bool(found)

    def _add(self, said: AnswerParts, part: str, is_whole: bool) -> AnswerParts:
        """`said` with a part of a message's body; `is_whole`: whether the body ends with it."""
        thought, text, calls = said
        if self._recipient:
            self._arguments += part
            if is_whole:
                calls = [*calls, *self.calls.numbered([(self._recipient, self._arguments.strip())])]
                self._arguments = ""
        elif part:
            is_thought = self._channel == "analysis" and self.separates
            part = f"\n\n{part}" if self._is_new and is_thought in self._written else part
            self._is_new, self._written = False, self._written | {is_thought}
            thought, text = (thought + part, text) if is_thought else (thought, text + part)
        return AnswerParts(thought, text, calls)
