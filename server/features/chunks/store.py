"""Stored objects of accounts, in the server's memory. Their KV is in the tree, which finds it by content."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from runtime.frontend.output import PartedPrompt
from server.errors import Conflict, NotFound


@dataclass(kw_only=True)
class StoredObject(ABC):
    """A stored object, whose KV can be computed before a prompt reads it.

    Attributes:
        id: the object's name within the account.
        digest: digest of the object's source.
        size: the object's memory, in units of the store.
        num_tokens: number of tokens in its KV.
        expires_s: time of expiry by the store's clock; None: never.
        pins: ids of the pins on its KV.
    """

    id: str
    digest: str
    size: int
    num_tokens: int = 0
    expires_s: float | None = None
    pins: list[str] = field(default_factory=list)

    def describe(self, now_s: float, live: Container[str]) -> dict[str, Any]:
        """The object's fields in answers; `live`: ids of the pins that still exist."""
        left = None if self.expires_s is None else max(round(self.expires_s - now_s, 1), 0.0)
        return {"pins": [pin for pin in self.pins if pin in live], "expires_in_s": left}

    def is_for(self, kv: Any, default: str) -> None:  # noqa: B027  (schemas have nothing to note)
        """Note the options of the requests that will read the object; `default`: the server's `--reuse`."""

    def is_reused(self, kv: Any) -> bool:
        """Whether requests with the options of `kv` reuse the object's KV, so that it is worth computing."""
        return True

    @abstractmethod
    def encoding(self, kv: Any) -> PartedPrompt:
        """A prompt that only encodes the object, for requests with the salt and options of `kv`."""

    @abstractmethod
    def details(self, prompt: PartedPrompt, cached: dict[str, int]) -> dict[str, Any]:
        """Further fields of an answer about one object; `cached`: cached tokens by entry of its encoding."""


S = TypeVar("S", bound=StoredObject)


class Store(Generic[S]):
    """The objects of all accounts. An account does not see expired objects, nor those of other accounts.

    Attributes:
        noun: the kind of object, for messages and paths.
        source: the request's field with an object's source.
        most, most_size: largest number and total size of an account's objects.
        bounds: these bounds in words.
    """

    noun: ClassVar[str]
    source: ClassVar[str]
    most: ClassVar[int]
    most_size: ClassVar[int]
    bounds: ClassVar[str]

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self._by_account: dict[str, dict[str, S]] = {}

    def of(self, account: str) -> list[S]:
        """The objects of an account, oldest first."""
        return [stored for stored in self._by_account.get(account, {}).values() if self._is_alive(stored)]

    def get(self, account: str, name: str) -> S:
        """An object by its id; thread-safe. Raises NotFound."""
        stored = self._by_account.get(account, {}).get(name)
        if stored is None or not self._is_alive(stored):
            raise NotFound(f"there is no {self.noun} {name!r}", param=self.noun, code=f"{self.noun}_not_found")
        return stored

    def put(self, account: str, new: S, ttl_s: float | None) -> tuple[S, bool]:
        """Keep an object for `ttl_s` from now. Returns the kept object, and whether it is new.

        Raises:
            Conflict: if a different object has the id, or the account would exceed its bounds.
        """
        kept = {stored.id: stored for stored in self.of(account)}
        known = kept.get(new.id)
        if known is not None and known.digest != new.digest:
            message = f"there is a different {self.noun} {new.id!r}; delete it first"
            raise Conflict(message, param=self.source, code=f"{self.noun}_exists")
        size = sum(stored.size for stored in kept.values()) + new.size
        if known is None and (len(kept) == self.most or size > self.most_size):
            raise Conflict(f"one client may store {self.bounds}", param=self.source, code=f"too_many_{self.noun}s")
        stored = kept[new.id] = known or new
        stored.expires_s = None if ttl_s is None else self.clock() + ttl_s
        self._by_account[account] = kept
        return stored, known is None

    def remove(self, account: str, name: str) -> S:
        """Delete and return an object. Running requests can still use it. Raises NotFound."""
        stored = self.get(account, name)
        del self._by_account[account][name]
        return stored

    def holds(self, account: str, stored: S) -> bool:
        """Whether this very object is stored, and not another object with its id."""
        return self._by_account.get(account, {}).get(stored.id) is stored

    def drop(self, account: str, stored: S) -> None:
        """Delete this very object, if it is still stored."""
        if self.holds(account, stored):
            del self._by_account[account][stored.id]

    def erase(self, account: str) -> None:
        """Delete all objects of an account."""
        self._by_account.pop(account, None)

    def _is_alive(self, stored: S) -> bool:
        return stored.expires_s is None or self.clock() < stored.expires_s
