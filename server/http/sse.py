"""Server-sent events, and cancellation when a client disconnects."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from runtime.errors import RametError
from server.errors import ClientGone, error_body
from server.http.answers import JsonAnswer, JsonObject, encode

log = logging.getLogger("ramet.server")

# Proxies close idle streams after 50 to 120 s, and agents those that have no event for some minutes. The first event
# comes sooner: until then a client does not know that its request was accepted.
KEEP_ALIVE_S, FIRST_S = 15.0, 1.0

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

Events = AsyncGenerator[JsonObject, None]
MakeEvents = Callable[[], Iterable[JsonObject]]
T = TypeVar("T")


class EventStream(StreamingResponse):
    """Sends dicts as events, then `[DONE]`. An error is the last event before `[DONE]`.

    When the client disconnects, the generator of events is closed at once, which aborts the request.
    """

    media_type = "text/event-stream"
    end = b"data: [DONE]\n\n"

    def __init__(self, events: Events, on_close: Callable[[], None], idle: Callable[[], Iterable[JsonObject]] = tuple):
        """`idle`: makes the events that keep the connection while there is no other event; none: a comment does."""
        super().__init__((), headers=_HEADERS)
        self.events = events
        self.on_close = on_close
        self._idle = idle
        self.status = 200  # how it ended, for the log: the client was told of an error by the last event
        self._due_s = time.monotonic() + min(FIRST_S, KEEP_ALIVE_S)  # time of the next event, if there is no other

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_wait_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # A client that leaves after the last event has its answer.
            if await self._send_all(gone, scope.get("state", {}).get("send_body", send)):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # the client disconnected during a write
        finally:
            gone.cancel()
            self.on_close()
            scope.setdefault("state", {})["ended_with"] = self.status

    async def _send_all(self, gone: asyncio.Future[None], send: Send) -> bool:
        """Send the events until the client is gone. Whether all were sent."""
        # A task of its own, because in this task each event would have to pass all middleware.
        events = asyncio.ensure_future(self._send_events(send))
        try:
            while not (gone.done() or events.done()):
                left_s = max(self._due_s - time.monotonic(), 0)
                done, _ = await asyncio.wait((gone, events), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done and self._due_s <= time.monotonic():
                    await self._send(b"".join(map(self.write, self._idle())) or b": keep-alive\n\n", send)
        finally:
            events.cancel()
            (ended,) = await asyncio.gather(events, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended
        return ended is None

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self.events):
            while (data := await self._next()) is not None:
                await self._send(self.write(data), send)
        if self.end:
            await self._send(self.end, send)

    async def _next(self) -> JsonObject | None:
        """The next event; None at the end. A failure becomes an error event."""
        try:
            return await anext(self.events, None)
        except RametError as error:
            self.status = error.status
            return self.describe(error)
        except Exception as error:
            # The status is already sent. Without an error event the stream would look complete.
            log.error("a stream failed", exc_info=error)
            self.status = RametError.status
            return self.describe(RametError("an internal error occurred"))

    def write(self, data: JsonObject) -> bytes:
        """The bytes of an event."""
        return b"data: %b\n\n" % encode(data)

    def describe(self, error: RametError) -> JsonObject:
        """The error event."""
        return error_body(error)

    async def _send(self, chunk: bytes, send: Send) -> None:
        self._due_s = time.monotonic() + KEEP_ALIVE_S
        await send({"type": "http.response.body", "body": chunk, "more_body": True})


class TypedEventStream(EventStream):
    """Events named by their `type`, as Anthropic's API and Responses have them, without `[DONE]`."""

    end = b""

    def write(self, data: JsonObject) -> bytes:
        return b"event: %b\n%b" % (str(data["type"]).encode(), super().write(data))

    def describe(self, error: RametError) -> JsonObject:
        return {**error_body(error)["error"], "type": "error"}


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, dict[str, Any] | list[Any]]) -> Response:
    """The result of `work` as JSON. Disconnecting cancels `work`."""
    return JsonAnswer(await while_there(request, work))


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Disconnecting cancels `work` and raises ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client has disconnected")
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.wait((task, gone))
