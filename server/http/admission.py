"""Middleware that checks requests and reads their bodies before the routes run."""

import asyncio
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import RametError
from server.errors import error_response
from server.http.limits import JSON, MOST_BYTES, BodyLimit

# After a refusal, at most this multiple of the body limit is read and dropped: a client that sends does not read.
_DRAIN = 8

Headers = dict[bytes, bytes]
Check = Callable[[Scope, Headers], None]


class AdmissionMiddleware:
    """ASGI middleware that passes a request on, with its whole body, if it passes all checks.

    Args:
        checks: functions of scope and headers that raise RametError; called before the body is read.
        limit: the limits on bodies.
        is_route: whether there is a route for a path. Other paths are not found, whatever their body is.
    """

    def __init__(self, app: ASGIApp, checks: Sequence[Check], limit: BodyLimit, is_route: Callable[[str], bool]):
        self.app, self.is_route = app, is_route
        self.checks = (*checks, limit.check)
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it to the application."""
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
            body = await self.limit.checked(body, headers) if self.is_route(scope["path"]) else b""
        except RametError as error:
            await self._refuse(error, scope, receive, send, unread=body is None and _announces_body(headers))
            return
        if b"content-type" not in headers:
            scope["headers"] = [*scope["headers"], (b"content-type", JSON)]
        await self.app(scope, _with_body(body, receive), send)

    async def _refuse(self, error: RametError, scope: Scope, receive: Receive, send: Send, unread: bool) -> None:
        """Send the error. If the body is unread, read on within limits, then close: the body may have no end."""
        response = error_response(error, scope["path"])
        if not unread:
            await response(scope, receive, send)
            return
        response.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        left = _DRAIN * MOST_BYTES
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


def _with_body(body: bytes, receive: Receive) -> Receive:
    pending = [body]

    async def read() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return read
