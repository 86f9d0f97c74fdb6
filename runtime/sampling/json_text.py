"""Checks of untrusted JSON text, from a request or a model's output."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import numpy as np

# Levels of lists and objects: far above the need of templates and schemas, far below the limit of the stack.
MAX_DEPTH = 64

# Lists, objects and names in objects, which cost most to parse: 4,096 messages with tool calls have half as many.
MAX_NODES = 1 << 17
# Values in lists and objects: a prompt of so many token ids fills the largest body.
MAX_VALUES = 1 << 20

_MARKS = b'"[]{}:,'
_NO_MARKS = bytes(set(range(256)) - set(_MARKS))


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for invalid JSON, bad shapes, NaN and lone surrogates.

    Python's own parser accepts the last two, which later writers of the value do not.
    """
    check_shape(text.encode())
    value = json.loads(text, parse_constant=_refuse)
    check_unicode(value)
    return value


def check_unicode(value: Any) -> None:
    """Raise ValueError if a JSON value holds lone surrogates or NaN."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate is not Unicode text") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def check_shape(text: bytes) -> None:
    """Raise ValueError for JSON text that is too deep or has too many nodes or values to be parsed.

    A megabyte of `[]` takes a fifth of a second and 30 MiB to parse; to count them takes milliseconds. The counts of
    text that is no JSON mean nothing, but up to its first error they are right.
    """
    if len(text) <= MAX_DEPTH:
        return
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(text.translate(None, _NO_MARKS), dtype=np.uint8)
    outside = marks[np.cumsum(marks == ord('"'), dtype=np.uint8) & 1 == 0]
    if sum(np.count_nonzero(outside == mark) for mark in b"[{:") > MAX_NODES:
        raise ValueError(f"more than {MAX_NODES} lists, objects and names")
    if np.count_nonzero(outside == ord(",")) >= MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    # "[" and "{" lie two below "]" and "}", and have the second bit set.
    steps = (outside[outside > ord(":")] & 2).astype(np.int8) - 1
    if steps.cumsum(dtype=np.int32).max(initial=0) > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} levels")
