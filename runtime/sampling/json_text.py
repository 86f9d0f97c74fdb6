"""Checks of untrusted JSON text, from a request or a model's output."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import numpy as np

# Levels of lists and objects: far above the need of templates and schemas, far below the limit of the stack.
MAX_DEPTH = 64

_BEGINNING = 1 << 12

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for invalid JSON, deep nesting, NaN and lone surrogates.

    Python's own parser accepts the last two, which later writers of the value do not.
    """
    if is_deep(text.encode()):
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
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


def is_deep(body: bytes) -> bool:
    """Whether JSON text is nested more than MAX_DEPTH levels deep."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    # Deeply nested text is mostly deep from its beginning: then megabytes need not be read.
    return _is_deep(body[:_BEGINNING]) or _is_deep(body)


def _is_deep(body: bytes) -> bool:
    brackets = np.frombuffer(_STRING.sub(b"", body).translate(None, _NO_BRACKETS), dtype=np.uint8)
    # "[" and "{" lie two below "]" and "}", and have the second bit set.
    steps = np.where(brackets & 2, 1, -1)
    return bool(len(steps)) and int(steps.cumsum(dtype=np.int32).max()) > MAX_DEPTH
