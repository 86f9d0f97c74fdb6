"""The one middleware before the routes: it checks a request, reads its body, and answers those that it refuses."""

import asyncio
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import RametError
from server.errors import error_response
from server.http.limits import JSON, BodyLimit

# Multiple of the body limit that is read and dropped, since a client that still sends does not read.
_DRAIN = 8

Headers = dict[bytes, bytes]
Check = Callable[[Scope, Headers], None]


class AdmissionMiddleware:
    """ASGI middleware: the application sees requests that have passed all checks, with their whole body.

    Args:
        checks: called with scope and headers before the body is read; they raise RametError.
        limit: on bodies.
    """

    def __init__(self, app: ASGIApp, checks: Sequence[Check], limit: BodyLimit):
        self.app = app
        self.checks = (*checks, limit.check)
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or run the application with it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})
        headers = dict(scope["headers"])
        body = None
        try:
            for check in self.checks:
                check(scope, headers)
            body = await self.limit.read(receive)
            if body is None:
                return
            self.limit.check_body(body, headers)
        except RametError as error:
            await self._refuse(error, scope, receive, send, unread=body is None and _announces_body(headers))
            return
        if b"content-type" not in headers:
            scope["headers"] = [*scope["headers"], (b"content-type", JSON)]
        await self.app(scope, _replay(body, receive), send)

    async def _refuse(self, error: RametError, scope: Scope, receive: Receive, send: Send, unread: bool) -> None:
        """Send the error. A connection with an unread body is read on for a while, and closed: it may never end."""
        response = error_response(error, scope["path"])
        if not unread:
            await response(scope, receive, send)
            return
        response.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        left = _DRAIN * self.limit.max_bytes
        try:
            async with asyncio.timeout(self.limit.patience_s):
                while left > 0:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        break
                    left -= len(message.get("body", b""))
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _announces_body(headers: Headers) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _replay(body: bytes, receive: Receive) -> Receive:
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay
