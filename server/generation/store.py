"""Responses and threads by account, for `TTL_S`; as JSON, so that all their bytes are counted."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from cachetools import TTLCache

from server.errors import NotFound
from server.http.context import provided

TTL_S = 86_400.0
# Most responses of an account, most bytes of an account, and most bytes of all accounts.
MOST, MOST_BYTES, MOST_BYTES_IN_ALL = 1000, 1 << 25, 1 << 27

Kind = Literal["response", "thread"]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response of an account, or a thread of messages.

    Attributes:
        body: the response as the client gets it, as JSON.
        items: the conversation before the answer, without instructions, as JSON.
        answered: the bytes of the answer's items as JSON, by id.
    """

    body: bytes
    items: bytes
    answered: Mapping[str, int]

    @property
    def size(self) -> int:
        """The response's part of MOST_BYTES; at least MOST_BYTES // MOST, which bounds the number of responses."""
        return max(len(self.body) + len(self.items), MOST_BYTES // MOST)

    @property
    def output(self) -> list[dict[str, Any]]:
        """The answer's items."""
        return msgspec.json.decode(self.body)["output"]


class ResponseStore:
    """The responses of all accounts. Their KV is in the tree, which finds it by content.

    An account over its bound loses its least recently used responses; over the common bound, the largest account does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._by_account: dict[str, TTLCache[str, StoredResponse]] = {}

    def _of(self, account: str) -> TTLCache[str, StoredResponse]:
        if account not in self._by_account:
            self._by_account[account] = TTLCache(MOST_BYTES, TTL_S, self._clock, lambda stored: stored.size)
        return self._by_account[account]

    def add(self, account: str, name: str, new: StoredResponse) -> None:
        """Store a response under its id, unless it exceeds an account's bound."""
        with suppress(ValueError):
            self._of(account)[name] = new
        while sum(kept.currsize for kept in self._by_account.values()) > MOST_BYTES_IN_ALL:
            max(self._by_account.values(), key=lambda kept: kept.currsize).popitem()

    def get(self, account: str, name: str, kind: Kind = "response") -> StoredResponse:
        """A response or thread by its id. Raises NotFound."""
        stored = self._of(account).get(name)
        if stored is None or kind != ("thread" if name.startswith("msg_") else "response"):
            raise NotFound(f"there is no {kind} {name!r}", param=kind, code=f"{kind}_not_found")
        return stored

    def remove(self, account: str, name: str) -> None:
        """Delete a response. Raises NotFound."""
        self.get(account, name)
        del self._of(account)[name]

    def erase(self, account: str) -> None:
        """Delete all responses of an account."""
        self._by_account.pop(account, None)

    def with_items(self, account: str, ids: set[str]) -> list[StoredResponse]:
        """The responses whose answers have one of these items."""
        return [stored for stored in self._of(account).values() if not ids.isdisjoint(stored.answered)]


def sizes_of(items: list[dict[str, Any]]) -> dict[str, int]:
    """The bytes of items as JSON, by id."""
    return {item["id"]: len(msgspec.json.encode(item)) for item in items}


Responses = Annotated[ResponseStore, provided(ResponseStore)]
