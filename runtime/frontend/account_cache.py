"""A store of recent values by account, bounded for each account and for all."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from cachetools import TTLCache

K = TypeVar("K")
V = TypeVar("V")


class AccountCache(Generic[K, V]):
    """Keeps values by account and key, each for a time. Thread-safe.

    An account over its bound loses its own least recently used values; over the common bound, the largest account does.

    Args:
        most, most_of_account: largest sums of sizes, of all accounts and of one.
        ttl_s: seconds for which a value is kept.
        size: the size of a value, at least 1.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        most: int,
        most_of_account: int,
        ttl_s: float,
        size: Callable[[V], int],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._most = most
        self._by_account = defaultdict[str, TTLCache[K, V]](lambda: TTLCache(most_of_account, ttl_s, clock, size))
        self._lock = threading.Lock()

    def add(self, account: str, key: K, value: V) -> None:
        """Keep a value, unless it is larger than an account's bound."""
        with self._lock:
            mine = self._by_account[account]
            with suppress(ValueError):
                mine[key] = value
            while sum(kept.currsize for kept in self._by_account.values()) > self._most:
                max(self._by_account.values(), key=lambda kept: kept.currsize).popitem()

    def get(self, account: str, key: K) -> V | None:
        with self._lock:
            mine = self._by_account.get(account)
            return None if mine is None else mine.get(key)

    def items(self, account: str) -> list[tuple[K, V]]:
        """All that is kept of an account."""
        with self._lock:
            mine = self._by_account.get(account)
            if mine is None:
                return []
            return [(key, value) for key in list(mine) if (value := mine.get(key)) is not None]  # one may just expire

    def remove(self, account: str, key: K) -> None:
        """Remove a value. Raises KeyError if it is not kept."""
        with self._lock:
            del self._by_account[account][key]

    def erase(self, account: str) -> None:
        """Remove all values of an account."""
        with self._lock:
            self._by_account.pop(account, None)
