"""The flag that tells all parts of the server that it is stopping."""

import asyncio

from runtime.errors import Overloaded


class ShutdownFlag:
    """While this flag is set, new requests are refused."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        """Wait until the flag is set."""
        await self._event.wait()

    def check(self) -> None:
        """Raise Overloaded if the flag is set."""
        if self._event.is_set():
            raise Overloaded("the server is shutting down")
