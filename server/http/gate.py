"""The gate that refuses new requests while the server stops."""

from __future__ import annotations

import asyncio

from runtime.errors import Overloaded


class Gate:
    def __init__(self) -> None:
        self._closed = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def check(self) -> None:
        """Raise Overloaded if the gate is closed."""
        if self.closed:
            raise Overloaded("the server is shutting down")
