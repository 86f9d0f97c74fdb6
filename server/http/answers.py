"""JSON of answers and events. Long lists are encoded while they grow, so that no encoding blocks the event loop."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.frontend.output import Output
from runtime.frontend.stream import OutputStream

# Log-probabilities of at most this many tokens are encoded on the event loop: 1 ms with 128 alternatives each.
_FEW = 16
# Bytes of a body in one ASGI message.
_PIECE = 1 << 18

# What `encode` takes for an object; values may be or contain JsonLists.
JsonObject = dict[str, object]

_append = msgspec.json.Encoder().encode_into


class JsonList:
    """A list in an answer, whose elements are encoded when they are added."""

    def __init__(self) -> None:
        self.text = bytearray(b"[]")
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, value: Any) -> None:
        self.text[-1:] = b"," if self._length else b""
        _append(value, self.text, -1)
        self.text += b"]"
        self._length += 1


def _written(value: object) -> msgspec.Raw:
    assert isinstance(value, JsonList)
    return msgspec.Raw(value.text)


# Encodes a value that may contain JsonLists. NaN and infinity become null.
encode = msgspec.json.Encoder(enc_hook=_written).encode


class JsonAnswer(Response):
    """A JSON response that is sent in pieces."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for start in range(0, len(body), _PIECE):
            piece, more = bytes(body[start : start + _PIECE]), start + _PIECE < len(body)
            await send({"type": "http.response.body", "body": piece, "more_body": more})


async def write_logprobs(outputs: OutputStream, write: Callable[[Output], None], output: Output) -> None:
    """Call `write` with an Output, then drop its log-probabilities. Many of them are written in a thread.

    Raises ValueError if a log-probability is NaN.
    """
    items = [item for several in (output.logprobs, output.prompt_logprobs) for item in several or ()]

    def work() -> None:
        for item in items:
            if not math.isfinite(sum((value for _, value in item.top), item.logprob or 0.0)):
                raise ValueError("a log-probability is not a number")
        write(output)
        output.logprobs = output.prompt_logprobs = None  # frees memory while the Output waits for other choices

    if len(items) > _FEW:
        await outputs.in_turn(work)
    elif items:
        work()
        await asyncio.sleep(0)  # lets other tasks run between Outputs that are already queued
