"""JSON that came from somebody else, as text within a request or as a model's output."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import numpy as np

# Levels of lists and objects. What a template or a JSON schema needs lies far below, what exhausts a stack far above.
MAX_DEPTH = 64

_BEGINNING = 1 << 12

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for what is none, is nested too deep, or holds half a surrogate pair.

    Python's own parser takes NaN and lone surrogates, which nothing that the value is passed on to can write.
    """
    if is_deep(text.encode()):
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    value = json.loads(text, parse_constant=_refuse)
    check_unicode(value)
    return value


def check_unicode(value: Any) -> None:
    """Raise ValueError if a JSON value holds text that is not Unicode, or a number that is none."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate is not Unicode text") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def is_deep(body: bytes) -> bool:
    """Whether JSON text is nested more than MAX_DEPTH levels deep."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    # What is deep mostly begins so, and is known without looking at megabytes.
    return _is_deep(body[:_BEGINNING]) or _is_deep(body)


def _is_deep(body: bytes) -> bool:
    brackets = np.frombuffer(_STRING.sub(b"", body).translate(None, _NO_BRACKETS), dtype=np.uint8)
    # "[" and "{" lie two below "]" and "}", and have the second bit set.
    steps = np.where(brackets & 2, 1, -1)
    return bool(len(steps)) and int(steps.cumsum(dtype=np.int32).max()) > MAX_DEPTH
