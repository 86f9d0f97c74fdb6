"""JSON of answers and events, whose long lists are encoded as they grow, and not all at once on the event loop."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.frontend.output import Output
from runtime.frontend.stream import OutputStream

# Tokens whose log-probabilities are written on the event loop; with 128 alternatives each they take a millisecond.
_FEW = 16
# Bytes of a body that are sent at once.
_PIECE = 1 << 18

_append = msgspec.json.Encoder().encode_into


class JsonList:
    """A list in an answer. Each of its elements is encoded once, when it is added."""

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


# The JSON of a value, which may hold JsonLists. What JSON lacks, such as NaN, is null.
encode = msgspec.json.Encoder(enc_hook=_written).encode


class JsonAnswer(Response):
    """The JSON of a value, sent in pieces."""

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
    """Call `write` with an Output whose log-probabilities are let go then; in a turn of its account if they are many.

    Raises ValueError for NaN.
    """
    items = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]

    def work() -> None:
        for item in items:
            if not math.isfinite(sum((value for _, value in item.top), item.logprob or 0.0)):
                raise ValueError("a log-probability is not a number")
        write(output)
        output.logprobs = output.prompt_logprobs = None  # an answer's last Outputs wait for each other

    if len(items) > _FEW:
        await outputs.in_turn(work)
    elif items:
        work()
        await asyncio.sleep(0)  # others go on between the Outputs that wait already
