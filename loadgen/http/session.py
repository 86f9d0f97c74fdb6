"""Sessions, their turns and messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]

_LABELS = {"user": "\n\nUser: ", "assistant": "\n\nAssistant:", "tool": "\n\nTool: ", "system": ""}


@dataclass(frozen=True)
class Message:
    """One message; its content is the concatenation of `parts`, which other requests may share."""

    role: Role
    parts: tuple[str, ...]

    @classmethod
    def of(cls, role: Role, *parts: str) -> Message:
        """A message of parts."""
        return cls(role, parts)

    @property
    def content(self) -> str:
        """The whole text."""
        return "".join(self.parts)


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        messages: new messages before the answer.
        output_tokens: wanted length of the answer; None leaves it to the server.
        think_s: seconds between the last answer and this turn.
        scripted_answer: stands for the server's answer in later turns, where answers are scripted.
    """

    messages: tuple[Message, ...]
    output_tokens: int | None = None
    think_s: float = 0.0
    scripted_answer: str | None = None


@dataclass(frozen=True)
class Session:
    """Turns, one after the other.

    Attributes:
        turns: at least one.
        group: sessions of one group share a prefix.
        dialogue: whether a plain-text prompt names the speakers; several turns need that.
        at_s: start time in a trace, in seconds.
    """

    turns: tuple[Turn, ...]
    group: str = ""
    dialogue: bool = False
    at_s: float | None = None


@dataclass
class Conversation:
    """A session's messages so far."""

    dialogue: bool
    messages: list[Message] = field(default_factory=list)

    def add(self, messages: Iterable[Message]) -> None:
        """Append messages."""
        self.messages.extend(messages)

    def as_chat(self) -> list[dict[str, str]]:
        """Messages for the chat API."""
        # Servers refuse a tool's message without the call that it answers; for a cache the role does not matter.
        return [
            {"role": "user" if message.role == "tool" else message.role, "content": message.content}
            for message in self.messages
        ]

    def as_text(self) -> str:
        """A plain prompt. Earlier turns are a prefix of later ones."""
        if not self.dialogue:
            return "\n\n".join(message.content for message in self.messages)
        return "".join(_LABELS[message.role] + message.content for message in self.messages) + "\n\nAssistant:"
