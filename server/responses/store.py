"""Responses by account, for as long as `TTL_S`; those that were used least recently give way to new ones."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from cachetools import TTLCache

from server.errors import NotFound
from server.http.context import provided
from server.responses.types import Item

TTL_S = 86_400.0
# Bounds for one account: responses, and characters of their conversations.
MOST, MOST_CHARACTERS = 1000, 1 << 24
# Memory of an item beside its text.
_CHARACTERS_OF_ITEM = 256


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response of an account.

    Attributes:
        body: the response in the client's form.
        items: the conversation before the answer, without instructions.
        characters: of the conversation.
    """

    body: dict[str, Any]
    items: list[Item]
    characters: int

    @property
    def size(self) -> int:
        """Its share of MOST_CHARACTERS, at least MOST_CHARACTERS // MOST."""
        return max(self.characters + len(self.items) * _CHARACTERS_OF_ITEM, MOST_CHARACTERS // MOST)


class ResponseStore:
    """Responses of all accounts; their KV lives in the tree, found by content."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._by_account: dict[str, TTLCache[str, StoredResponse]] = {}

    def _of(self, account: str) -> TTLCache[str, StoredResponse]:
        if account not in self._by_account:
            self._by_account[account] = TTLCache(MOST_CHARACTERS, TTL_S, self._clock, lambda stored: stored.size)
        return self._by_account[account]

    def add(self, account: str, new: StoredResponse) -> None:
        """Keep a response, unless it is larger than an account's bound."""
        with suppress(ValueError):
            self._of(account)[new.body["id"]] = new

    def get(self, account: str, name: str) -> StoredResponse:
        """A response by its id. Raises NotFound."""
        stored = self._of(account).get(name)
        if stored is None:
            raise NotFound(f"there is no response {name!r}", param="response", code="response_not_found")
        return stored

    def remove(self, account: str, name: str) -> None:
        """Forget a response. Raises NotFound."""
        self.get(account, name)
        del self._of(account)[name]

    def items(self, account: str) -> dict[str, dict[str, Any]]:
        """The items of all answers, by their ids."""
        return {item["id"]: item for stored in self._of(account).values() for item in stored.body["output"]}


Responses = Annotated[ResponseStore, provided(ResponseStore)]
