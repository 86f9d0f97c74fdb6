"""Limits on bodies, checked while they are read and before they are parsed.

They and `Body` keep the cost of a body within its length, whatever it holds: no megabyte takes a tenth of a second.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import DeadlineExceeded, InvalidRequest
from runtime.sampling.json_text import check_shape
from server.http.errors import BodyTooLarge, UnsupportedMediaType, error_response
from server.http.refusal import Refusal

_JSON = b"application/json"


class BodyLimit:
    """ASGI middleware: refuses bodies that are too large (413), too slow (408) or not JSON (415)."""

    def __init__(self, app: ASGIApp, max_bytes: int, patience_s: float, refuse: Refusal):
        self.app = app
        self.max_bytes = max_bytes
        self.patience_s = patience_s
        self.refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then run the application with it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if b"transfer-encoding" in headers and b"content-length" in headers:
            # A proxy that trusts the other header sees the next request begin elsewhere.
            await self.refuse(
                InvalidRequest("Content-Length and Transfer-Encoding exclude each other"), scope, receive, send
            )
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > self.max_bytes):
            await self.refuse(self._too_large(), scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.patience_s):
                body = await self._read(receive)
        except TimeoutError:
            await self.refuse(DeadlineExceeded("the body did not arrive in time"), scope, receive, send)
            return
        except BodyTooLarge as error:
            await self.refuse(error, scope, receive, send)
            return
        if body is None:
            return
        if body and (wrong := _unreadable(headers)):
            await error_response(UnsupportedMediaType(wrong))(scope, receive, send)
            return
        try:
            check_shape(body)
        except ValueError as error:
            await error_response(InvalidRequest(f"the body has {error}"))(scope, receive, send)
            return
        if b"content-type" not in headers:
            scope = {**scope, "headers": [*scope["headers"], (b"content-type", _JSON)]}
        await self.app(scope, _replay(body, receive), send)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self.max_bytes} bytes")

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None if the client has left. Raises BodyTooLarge."""
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self.max_bytes:
                raise self._too_large()
            if not message.get("more_body"):
                return b"".join(chunks)


def _unreadable(headers: dict[bytes, bytes]) -> str:
    """The reason to refuse a body with these headers; empty if there is none."""
    kind = headers.get(b"content-type", _JSON).split(b";")[0].strip().lower()
    if kind != _JSON and not kind.endswith(b"+json"):
        return "the body must be JSON: send the header Content-Type: application/json"
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        return "the body must not be compressed"
    return ""


def _replay(body: bytes, receive: Receive) -> Receive:
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay
