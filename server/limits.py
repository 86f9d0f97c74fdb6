"""What a request's body may be, checked while it is read and before anything parses it."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import BodyTooLarge, UnsupportedMediaType, error_response

# A client that still sends does not read; so much more of its body is thrown away, in units of the limit.
_DRAIN = 8

_JSON = b"application/json"


class BodyLimit:
    """ASGI middleware: bodies over the limit are refused with 413, bodies that are not JSON with 415."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with a `receive` that has read the body already."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH", "DELETE"):
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_bytes:
            await self._refuse(receive, send)
            return
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self.max_bytes:
                await self._refuse(receive, send)
                return
            if not message.get("more_body"):
                break
        if size and not _is_json(headers.get(b"content-type", _JSON)):
            error = UnsupportedMediaType("the body must be JSON: send the header Content-Type: application/json")
            await error_response(error)(scope, receive, send)
            return
        if b"content-type" not in headers:
            scope = {**scope, "headers": [*scope["headers"], (b"content-type", _JSON)]}
        await self.app(scope, _replay(b"".join(chunks), receive), send)

    async def _refuse(self, receive: Receive, send: Send) -> None:
        """Answer 413, and keep the connection long enough for a client that sends before it reads."""
        response = error_response(BodyTooLarge(f"the body is larger than {self.max_bytes} bytes"))
        response.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        left = _DRAIN * self.max_bytes
        while left > 0:
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body"):
                break
            left -= len(message.get("body", b""))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _is_json(content_type: bytes) -> bool:
    kind = content_type.split(b";")[0].strip().lower()
    return kind == _JSON or kind.endswith(b"+json")


def _replay(body: bytes, receive: Receive) -> Receive:
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay
