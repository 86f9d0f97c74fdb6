"""Server-sent events, and cancellation when a client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from runtime.errors import RametError
from server.http.answers import JsonAnswer, encode
from server.http.errors import error_body

log = logging.getLogger("ramet.server")

# Proxies cut idle streams after 50 to 120 s.
KEEP_ALIVE_S = 15.0

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

Events = AsyncGenerator[dict[str, Any], None]


class EventStream(StreamingResponse):
    """Sends dicts as events, then `[DONE]`; an error is the last event before it.

    When the client disconnects, the generator is closed at once, which aborts its requests.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, on_close: Callable[[], None]):
        super().__init__((), headers=_HEADERS)
        self.events = events
        self.on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_wait_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # Exited in reverse: the task that waits for an event ends before its generator is closed.
            async with aclosing(self.events) as events, aclosing(_chunks(events, gone)) as chunks:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # the client disconnected during a write
        finally:
            gone.cancel()
            self.on_close()


async def _chunks(events: Events, gone: asyncio.Future[None]) -> AsyncGenerator[bytes, None]:
    while True:
        step = asyncio.ensure_future(anext(events))
        try:
            while not step.done():
                await asyncio.wait((step, gone), timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if not step.done():
                    yield b": keep-alive\n\n"
            yield _event(step.result())
        except StopAsyncIteration:
            break
        except RametError as error:
            yield _event(error_body(error))
            break
        except Exception as error:
            # The status was sent; a stream that merely ends would look like a success.
            log.error("a stream failed", exc_info=error)
            yield _event(error_body(RametError("an internal error occurred")))
            break
        finally:
            step.cancel()
            await asyncio.wait((step,))
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % encode(data)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, dict[str, Any] | list[Any]]) -> Response:
    """The JSON response of `work`, which is cancelled when the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Response(status_code=499)
        return JsonAnswer(task.result())
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.wait((task, gone))
