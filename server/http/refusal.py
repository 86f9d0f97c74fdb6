"""Error responses to requests whose body has not been read."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from runtime.errors import RametError
from server.http.errors import error_response

# Multiple of the body limit that is read and dropped, since a client that still sends does not read.
_DRAIN = 8


class Refusal:
    """Answers with an error, and keeps the connection open for clients that send their body before they read.

    Args:
        max_bytes: the body limit; eight times as much is read and dropped.
        patience_s: seconds for that.
    """

    def __init__(self, max_bytes: int, patience_s: float):
        self._most_bytes = _DRAIN * max_bytes
        self._patience_s = patience_s

    async def __call__(self, error: RametError, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the error. A connection on which a body was announced is closed, since the body may never come."""
        response = error_response(error)
        if not _announces_body(scope):
            await response(scope, receive, send)
            return
        response.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        left = self._most_bytes
        try:
            async with asyncio.timeout(self._patience_s):
                while left > 0:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        break
                    left -= len(message.get("body", b""))
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _announces_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
