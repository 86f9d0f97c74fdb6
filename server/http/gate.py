"""Whether the server takes new work."""

from __future__ import annotations

import asyncio

from runtime.errors import Overloaded


class Gate:
    """Open until the server is told to stop; then what is new is refused, and what runs may end."""

    def __init__(self) -> None:
        self._closed = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether the server is about to stop."""
        return self._closed.is_set()

    def close(self) -> None:
        """Take no new work from now on."""
        self._closed.set()

    async def wait_closed(self) -> None:
        """Return once the server was told to stop."""
        await self._closed.wait()

    def check(self) -> None:
        """Raise Overloaded once it is closed."""
        if self.closed:
            raise Overloaded("the server is shutting down")
