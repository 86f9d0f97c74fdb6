"""Responses by account, for as long as `TTL_S`; the oldest ones give way to new ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from server.openai.types import Message
from server.store import Lease, Store

TTL_S = 86_400.0
# Memory of a turn beside its text.
_CHARACTERS_OF_TURN = 256


@dataclass(slots=True)
class StoredResponse:
    """A response of an account.

    Attributes:
        body: as clients saw it.
        turns: the conversation with its answer, without instructions.
        num_asked: turns before the answer.
    """

    body: dict[str, Any]
    turns: list[Message]
    num_asked: int
    lease: Lease = field(default_factory=Lease)

    @property
    def id(self) -> str:
        return self.body["id"]

    @property
    def digest(self) -> str:
        return self.id

    @property
    def size(self) -> int:
        """The memory that it takes, in characters."""
        return sum(turn.num_characters + _CHARACTERS_OF_TURN for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """None: no KV is kept for it."""
        return 0


class ResponseStore(Store[StoredResponse]):
    """Responses of all accounts; their KV lives in the tree, found by content."""

    noun = "response"
    source = "previous_response_id"
    most = 1000
    most_size = 1 << 24  # characters
    bounds = f"{most} responses of {most_size} characters together"

    def add(self, account: str, new: StoredResponse) -> None:
        """Keep a response; those that it has no room beside are forgotten, and so is one that is too large itself."""
        if new.size > self.most_size:
            return
        kept = self.of(account)
        size = sum(stored.size for stored in kept) + new.size
        for count, oldest in enumerate(kept):
            if len(kept) - count < self.most and size <= self.most_size:
                break
            self.drop(account, oldest)
            size -= oldest.size
        self.put(account, new, TTL_S)

    def items(self, account: str) -> dict[str, dict[str, Any]]:
        """The items of all answers, by their ids."""
        return {item["id"]: item for stored in self.of(account) for item in stored.body["output"]}
