"""Requests blocked on an event: a compiled grammar, an entry that a peer computes, loaded KV."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from runtime.request import Request


class Blocked:
    """Blocked requests by the event that wakes them: a key and the progress that is awaited.

    Keys: a request id while its grammar is compiled, a running request whose tokens are shared, a transfer.
    """

    def __init__(self) -> None:
        self._waits: dict[Hashable, dict[Request, int]] = {}
        self._keys: dict[Request, Hashable] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._keys)

    def add(self, request: Request, key: Hashable, at: int = 0) -> None:
        """Block a request until `wake` is called for a key with `at` or more."""
        self._waits.setdefault(key, {})[request] = at
        self._keys[request] = key

    def remove(self, request: Request) -> Hashable:
        """Remove a request; returns its key."""
        key = self._keys.pop(request)
        waits = self._waits[key]
        del waits[request]
        if not waits:
            del self._waits[key]
        return key

    def waiting_for(self, key: Hashable) -> list[Request]:
        """The requests that wait for a key, in order."""
        return list(self._waits.get(key, ()))

    def wake(self, key: Hashable, reached: int | None = None) -> list[Request]:
        """Remove and return the requests that an event wakes; `reached`: its progress, None: complete."""
        ready = [r for r, at in self._waits.get(key, {}).items() if reached is None or at <= reached]
        for request in ready:
            self.remove(request)
        return ready
