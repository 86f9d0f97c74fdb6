"""HTTP/1.1 connections with timeouts, and with stricter checks of heads than h11's."""

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import Any

import h11
from starlette.types import Message
from uvicorn.protocols.http.h11_impl import H11Protocol

from runtime.errors import InvalidRequest
from runtime.frontend.output import new_rid
from runtime.logs import request_id
from server.errors import error_response
from server.http.access import ID_HEADER

# The kernel's send buffer. Its default grows to megabytes for a client that does not read.
SEND_BUFFER_BYTES = 128 << 10

_HEAD_END = re.compile(rb"\n\r?\n")
_FOLD = re.compile(rb"\r?\n[ \t]+")
_LENGTHS = re.compile(rb"^content-length:.*$", re.IGNORECASE | re.MULTILINE)
_CHUNKED = b"\r\nTransfer-Encoding: chunked\r\n"
_AUTHORITY = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)


class _Parser(h11.Connection):
    """h11's parser, but it refuses repeated Content-Length headers and reduces absolute targets to their path.

    h11 merges equal Content-Length headers, so the raw head is searched first.
    """

    _chunked = False

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if self._chunked and isinstance(event, h11.Data) and event.data:  # a stream's event; far faster than h11
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        data = super().send(event)
        self._chunked = isinstance(event, h11.Response) and data is not None and _CHUNKED in data
        return data

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            data = self.trailing_data[0]
            if end := _HEAD_END.search(data):
                lengths = _LENGTHS.findall(_FOLD.sub(b" ", data[: end.end()]))
                if len(lengths) > 1 or any(b"," in length for length in lengths):
                    raise h11.RemoteProtocolError("more than one Content-Length")
        event = super().next_event()
        if isinstance(event, h11.Request) and (found := _AUTHORITY.match(event.target)):
            path = event.target[found.end() :]
            target = path if path.startswith(b"/") else b"/" + path
            return h11.Request(
                method=event.method, target=target, headers=event.headers, http_version=event.http_version
            )
        return event


class HttpConnection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with timeouts for clients that do not finish a head or do not read a response.

    Args:
        on_end: called when the connection has ended.
        patience_s: seconds until such a client's connection is closed, which aborts its request.
        app_state: state of the requests' scopes; `send_body` and `connections` are added to it.
        uvicorn: further arguments of uvicorn's protocol.
    """

    def __init__(self, on_end: Callable[[], None], patience_s: float, app_state: dict[str, Any], **uvicorn: Any):
        super().__init__(app_state={**app_state, "send_body": self.send_body}, **uvicorn)
        self.app_state["connections"] = self.connections
        self.on_end = on_end
        self.patience_s = patience_s
        self.conn = _Parser(h11.SERVER)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._lingers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self.on_end()
        super().connection_lost(exc)

    async def send_body(self, message: Message) -> None:
        """Send a piece of a body without passing the middleware, because a stream has thousands of pieces."""
        if self.flow.write_paused:
            await self.flow.drain()
        if not self.cycle.disconnected:
            self.transport.write(self.conn.send(h11.Data(data=message["body"])))

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            return
        # A new id also for log lines that belong to no request.
        token = request_id.set(new_rid())
        try:
            super().data_received(data)
        finally:
            request_id.reset(token)
        if not self._lingers:
            self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()  # a part of the next head may have arrived

    def _watch_head(self) -> None:
        """Run the timer while the rest of a head is missing, or the rest of a body that is already answered."""
        answered = self.cycle is None or self.cycle.response_complete
        owes_head = self.conn.their_state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0] != b"")
        owes = owes_head or (self.conn.their_state is h11.SEND_BODY and answered)
        if owes and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.patience_s, self.transport.abort)
        elif not owes and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.patience_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing, so that refused WebSockets cannot fill the log."""

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP in the error schema."""
        answer = error_response(InvalidRequest("this is not a valid HTTP request"))
        headers = [*answer.raw_headers, (b"connection", b"close"), (ID_HEADER, request_id.get().encode())]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            events = (
                h11.Response(status_code=answer.status_code, headers=headers, reason=b"Bad Request"),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self._linger()

    def _linger(self) -> None:
        """Half-close the connection. Close it when the client does, or after `patience_s`.

        Closing at once with unread bytes would send a reset, which may overtake the answer.
        """
        self._lingers = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has disconnected
                self.transport.write_eof()
        self.flow.resume_reading()
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(self.patience_s, self.transport.abort)
