"""Responses and threads by account, for `TTL_S`; as JSON, so that all their bytes are counted."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from runtime.frontend.account_cache import AccountCache
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
    """The responses of all accounts. Their KV is in the tree, which finds it by content."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._stored = AccountCache[str, StoredResponse](
            MOST_BYTES_IN_ALL, MOST_BYTES, TTL_S, lambda stored: stored.size, clock
        )

    def add(self, account: str, name: str, new: StoredResponse) -> None:
        """Store a response under its id, unless it exceeds an account's bound."""
        self._stored.add(account, name, new)

    def get(self, account: str, name: str, kind: Kind = "response") -> StoredResponse:
        """A response or thread by its id. Raises NotFound."""
        stored = self._stored.get(account, name)
        if stored is None or kind != ("thread" if name.startswith("msg_") else "response"):
            raise NotFound(f"there is no {kind} {name!r}", param=kind, code=f"{kind}_not_found")
        return stored

    def remove(self, account: str, name: str) -> None:
        """Delete a response. Raises NotFound."""
        self.get(account, name)
        self._stored.remove(account, name)

    def erase(self, account: str) -> None:
        """Delete all responses of an account."""
        self._stored.erase(account)

    def with_items(self, account: str, ids: set[str]) -> list[StoredResponse]:
        """The responses whose answers have one of these items."""
        if not ids:
            return []
        return [stored for _, stored in self._stored.items(account) if not ids.isdisjoint(stored.answered)]


def sizes_of(items: list[dict[str, Any]]) -> dict[str, int]:
    """The bytes of items as JSON, by id."""
    return {item["id"]: len(msgspec.json.encode(item)) for item in items}


Responses = Annotated[ResponseStore, provided(ResponseStore)]
