"""JSON of answers and events, whose long lists are encoded as they grow, and not all at once on the event loop."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any

from runtime.frontend.output import Output

# Tokens whose log-probabilities are written on the event loop; with 128 alternatives each they take milliseconds.
_FEW = 16
# Stands for a list in the text of its answer; no model can guess it.
_PLACE = secrets.token_hex(16)


class JsonList:
    """A list in an answer. Each of its elements is encoded once, when it is added."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, value: Any) -> None:
        """Add an element. Raises ValueError for NaN, which JSON lacks."""
        self._text += b"," * bool(self._length) + encode(value)
        self._length += 1

    def to_bytes(self) -> bytes:
        return b"[" + bytes(self._text) + b"]"


def encode(value: Any) -> bytes:
    """The JSON of a value, which may hold JsonLists. Raises ValueError for NaN, which JSON lacks."""
    lists: deque[JsonList] = deque()

    def place(inner: object) -> str:
        if not isinstance(inner, JsonList):
            raise TypeError(f"{type(inner).__name__} has no JSON")
        lists.append(inner)
        return _PLACE

    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=place).encode()
    return re.sub(b'"%b"' % _PLACE.encode(), lambda _: lists.popleft().to_bytes(), text) if lists else text


async def write_logprobs(write: Callable[[Output], None], output: Output) -> None:
    """Call `write` with an Output; in a thread if it has many log-probabilities, and let others go on after each."""
    count = len(output.logprobs or ()) + len(output.prompt_logprobs or ())
    if count > _FEW:
        await asyncio.to_thread(write, output)
    elif count:
        write(output)
        await asyncio.sleep(0)
