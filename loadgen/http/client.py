"""An HTTP client that sends a request, reads its stream, and names the kind of a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadgen.http.apis import Answer, Api, BadEvent, RequestFields, ServerError
from loadgen.http.record import UNFINISHED, Record
from loadgen.http.session import Conversation
from loadgen.http.sse import EventSplitter

_CONNECT_S = 10.0


class Failed(Exception):
    """A failed request. The report counts failures by `kind`."""

    def __init__(self, kind: str, message: str = ""):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a request.

    Attributes:
        total_s: most seconds from sending to the end.
        stall_s: most seconds without a byte.
    """

    total_s: float = 600.0
    stall_s: float = 300.0


class Client:
    """A client of one server and one API. Enter it before use."""

    def __init__(self, url: str, api: Api, fields: RequestFields, timeouts: Timeouts, key: str | None = None):
        self._url = url.rstrip("/") + api.path
        self._api = api
        self._fields = fields
        self._timeouts = timeouts
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def __aenter__(self) -> Client:
        # `Load` limits the open requests, so the connector does not.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self._timeouts.stall_s)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, conversation: Conversation, record: Record, now_s: Callable[[], float]) -> str:
        """Send the conversation and return the answer's text. The record is filled even after a failure."""
        body = self._api.body(conversation, record.wanted_tokens, self._fields)
        record.prompt_chars = sum(len(part) for message in conversation.messages for part in message.parts)
        answer = self._api.answer(record)
        record.sent_s = now_s()
        try:
            async with asyncio.timeout(self._timeouts.total_s):
                await self._stream(body, answer, now_s)
        except BaseException as error:
            record.error, record.message = _kind(error), str(error)[:300].encode("utf-8", "replace").decode() or None
            if record.error is None:
                record.error = UNFINISHED
                raise
        finally:
            record.end_s = now_s()
            answer.end()
        return answer.text

    async def _stream(self, body: dict[str, Any], answer: Answer, now_s: Callable[[], float]) -> None:
        done = False
        async with self._session.post(self._url, json=body) as response:
            answer.record.status = response.status
            if response.status != 200:
                raise Failed(f"http {response.status}", (await response.content.read(1000)).decode(errors="replace"))
            splitter = EventSplitter()
            async for chunk in response.content.iter_any():
                done = _take(splitter.feed(chunk), answer, now_s()) or done
            done = _take(splitter.close(), answer, now_s()) or done
        _check(answer, done)


def _take(events: list[bytes], answer: Answer, now_s: float) -> bool:
    done = False
    for event in events:
        if event == b"[DONE]":
            done = True
        else:
            answer.take(event, now_s)
    # The wanted length ends an endless stream before the timeouts do.
    wanted = answer.record.wanted_tokens
    if wanted is not None and len(answer.record.arrivals_s) > 4 * wanted + 1000:
        raise Failed("overrun", f"{len(answer.record.arrivals_s)} pieces for {wanted} requested tokens")
    return done


def _check(answer: Answer, done: bool) -> None:
    """Raise Failed unless the answer is complete."""
    record = answer.record
    if not done and not answer.finished:
        raise Failed("cut", "the stream ended without a finish reason and without [DONE]")
    if record.finish_reason in ("abort", "error"):
        raise Failed("aborted", f"finish reason {record.finish_reason}")
    if not record.arrivals_s:
        raise Failed("empty", "the stream held no text")


def _kind(error: BaseException) -> str | None:
    """The kind of a failure in the report; None for a cancellation.

    A lost connection is a "reset" before the head of the answer, and a "cut" after it.
    """
    match error:
        case asyncio.CancelledError():
            return None
        case Failed():
            return error.kind
        case ServerError():
            return "server error"
        case aiohttp.ConnectionTimeoutError() | aiohttp.ClientConnectorError():
            return "connect"
        case aiohttp.SocketTimeoutError():
            return "stall"
        case TimeoutError():
            return "timeout"
        case aiohttp.ClientPayloadError():
            return "cut"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError() | ConnectionError():
            return "reset"
        case BadEvent() | aiohttp.ClientError() | ValueError():
            return "rubbish"
        case Exception():
            # Most likely a defect of the load generator, which must not end a run of hours.
            return f"defect: {type(error).__name__}"
    raise error
