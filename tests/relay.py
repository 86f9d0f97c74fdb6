"""A TCP relay that can be cut, slow, or stalled."""

import asyncio
import contextlib
import threading
from typing import Self


class Relay:
    """Listens on a port of 127.0.0.1 while entered, and passes on to another one.

    Attributes:
        port: its own.
        bytes_per_s: of answers; 0: nothing passes any more, and connections stay open. None: as fast as it can.
    """

    def __init__(self, target: int):
        self.bytes_per_s: float | None = None
        self.port = 0
        self._target = target
        self._whole = True
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)
        self.port = self._server.sockets[0].getsockname()[1]
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
        self._server.close()
        self._close_all()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _close_all(self) -> None:
        for writer in self._open:
            writer.transport.abort()  # at once, whatever is still to be sent

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        if self._whole:
            with contextlib.suppress(OSError):  # the target is not there
                source, answers = await asyncio.open_connection("127.0.0.1", self._target)
                self._open.add(answers)
                await asyncio.gather(self._pass_on(reader, answers, False), self._pass_on(source, writer, True))
                self._open.remove(answers)
        writer.close()
        self._open.remove(writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                while self.bytes_per_s == 0:
                    await asyncio.sleep(0.01)
                if is_answer and self.bytes_per_s:
                    await asyncio.sleep(len(data) / self.bytes_per_s)
                writer.write(data)
                await writer.drain()
        writer.close()
