"""A TCP relay that can be cut: what its source sends meanwhile is lost to those behind it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Self


class Relay:
    """Listens on 127.0.0.1 while entered.

    Args:
        target: `tcp://host:port`.

    Attributes:
        endpoint: its own, in the same form.
    """

    def __init__(self, target: str):
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._whole = True
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self.endpoint = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def cut(self) -> None:
        """Close all connections, and every new one."""
        self._whole = False
        self._loop.call_soon_threadsafe(self._close_all)

    def mend(self) -> None:
        """Pass on again."""
        self._whole = True

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _stop(self) -> None:
        self._whole = False
        self._server.close()
        self._close_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _close_all(self) -> None:
        for writer in self._open:
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._whole:
            writer.close()
            return
        source, answers = await asyncio.open_connection(*self._target)
        self._open |= {writer, answers}
        for one, other in ((source, writer), (reader, answers)):
            self._tasks.append(asyncio.create_task(_pass_on(one, other)))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
