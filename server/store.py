"""Objects of accounts, in the server's process; their KV lives in the tree, found by content."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from runtime.errors import RametError
from server.http.errors import NotFound


class Conflict(RametError):
    """Another object is in the way: one of the name, too many others, or this one went meanwhile (HTTP 409)."""

    status = 409
    type = "conflict_error"


@dataclass(slots=True)
class Lease:
    """The time for which an object is kept, and its pins.

    Attributes:
        expires_s: on the store's clock; None: never.
        pins: ids of the pins of its KV.
    """

    expires_s: float | None = None
    pins: list[str] = field(default_factory=list)

    def describe(self, now_s: float, live: Container[str]) -> dict[str, Any]:
        """The fields for clients; `live`: ids of the pins that the engine has."""
        left = None if self.expires_s is None else max(round(self.expires_s - now_s, 1), 0.0)
        return {"pins": [pin for pin in self.pins if pin in live], "expires_in_s": left}


class Stored(Protocol):
    """An object of an account.

    Attributes:
        id: its name for the account.
        digest: of all that it was made from.
        num_tokens: whose KV it stands for.
        size: the memory that it takes, in units of the store.
    """

    lease: Lease

    @property
    def num_tokens(self) -> int: ...

    @property
    def id(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def size(self) -> int: ...


S = TypeVar("S", bound=Stored)


class Store(Generic[S]):
    """The objects of all accounts; one that has expired, or is another account's, does not exist.

    Attributes:
        noun: for messages.
        source: the field of a request that an object is made from.
        most, most_size: bounds for one account.
        bounds: the same for people.
    """

    noun: ClassVar[str]
    source: ClassVar[str]
    most: ClassVar[int]
    most_size: ClassVar[int]
    bounds: ClassVar[str]

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self._kept: dict[str, dict[str, S]] = {}

    def of(self, account: str) -> list[S]:
        """The objects of an account, oldest first."""
        return [stored for stored in self._kept.get(account, {}).values() if self._lives(stored)]

    def get(self, account: str, name: str) -> S:
        """An object by its id; thread-safe. Raises NotFound."""
        stored = self._kept.get(account, {}).get(name)
        if stored is None or not self._lives(stored):
            raise NotFound(f"there is no {self.noun} {name!r}", param=self.noun, code=f"{self.noun}_not_found")
        return stored

    def put(self, account: str, new: S, ttl_s: float | None) -> tuple[S, bool]:
        """Keep an object, from now on for `ttl_s`; returns the kept one, and whether it is new.

        Raises:
            Conflict: if a different one has the id, or over the account's bounds.
        """
        kept = {stored.id: stored for stored in self.of(account)}
        known = kept.get(new.id)
        if known is not None and known.digest != new.digest:
            message = f"there is another {self.noun} {new.id!r}; delete it first"
            raise Conflict(message, param=self.source, code=f"{self.noun}_exists")
        size = sum(stored.size for stored in kept.values()) + new.size
        if known is None and (len(kept) == self.most or size > self.most_size):
            raise Conflict(f"one client may keep {self.bounds}", param=self.source, code=f"too_many_{self.noun}s")
        stored = kept[new.id] = known or new
        stored.lease.expires_s = None if ttl_s is None else self.clock() + ttl_s
        self._kept[account] = kept
        return stored, known is None

    def remove(self, account: str, name: str) -> S:
        """Forget an object and return it; requests that use it go on. Raises NotFound."""
        stored = self.get(account, name)
        del self._kept[account][name]
        return stored

    def holds(self, account: str, stored: S) -> bool:
        """Whether this very object is kept, and no other one of its id."""
        return self._kept.get(account, {}).get(stored.id) is stored

    def drop(self, account: str, stored: S) -> None:
        """Forget this very object, if it is still kept."""
        if self.holds(account, stored):
            del self._kept[account][stored.id]

    def _lives(self, stored: S) -> bool:
        expires_s = stored.lease.expires_s
        return expires_s is None or self.clock() < expires_s
