"""Checks of untrusted JSON text, from a request or a model's output."""

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
from pydantic_core import from_json

from runtime.errors import InvalidRequest

# Nesting depth: far above what templates and schemas need, far below the stack's limit.
MAX_DEPTH = 64
# Limit for lists, objects, names and fractions, which take longest to parse and write. 4,096 messages with one tool
# call each stay below it.
MAX_NODES = 1 << 16
# Limit for values in lists and objects; a prompt of this many token ids fills the largest allowed body.
MAX_VALUES = 1 << 20

# Formats of texts that llguidance follows.
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
# Keywords of schemas whose value is a map of schemas, and those whose value is no schema.
_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_CONSTANTS = {"enum", "const", "default", "examples"}
_NODES = b"[{:.eE"
_NO_MARKS = bytes(set(range(256)) - set(b'"]},' + _NODES))
_SHORT = 1 << 12
_FEW = 1 << 12
# In texts longer than the first, the second number of strings is left out one by one.
_LONG, _STRINGS = 1 << 18, 1 << 10
# Found in one pass, faster than by `in`: what may be a surrogate's escape, and escapes after which marks may be missed.
_SURROGATE, _MISLEADING = re.compile(rb"\\u[dD]"), re.compile(rb'\\[\\"]')
# The escape of a lone surrogate, in a text without escaped backslashes.
_HEX = b"[0-9a-fA-F]{2}"
_HIGH, _LOW = rb"\\u[dD][89abAB]" + _HEX, rb"\\u[dD][c-fC-F]" + _HEX
_LONE = re.compile(b"%b(?!%b)|(?<!%b)%b" % (_HIGH, _LOW, _HIGH, _LOW))
# Stands for an escaped backslash; no JSON text has such a character.
_BACKSLASH = b"\x01"


def parse_json(text: str) -> Any:
    """The value of a JSON text, see `mend_surrogates`. Raises ValueError for invalid JSON, bad shapes and NaN."""
    raw = text.encode()
    check_shape(raw)
    value = json.loads(mend_surrogates(raw), parse_constant=_refuse)
    check_unicode(value)
    return value


def read_json(text: bytes) -> Any:
    """As `json.loads`, with its errors. Long strings of ASCII take a tenth of its time, others up to half more."""
    if text.count(rb"\u") <= len(text) >> 6:  # such escapes take three times as long
        with suppress(ValueError):  # this reader takes no NaN and no lone surrogate; its errors name no place
            return from_json(text, allow_inf_nan=False, cache_strings="none")
    return json.loads(text)


def mend_surrogates(text: bytes) -> bytes:
    """JSON text with U+FFFD in place of each lone surrogate, which is no Unicode: a client may have cut a character."""
    if b"\\" not in text or not _SURROGATE.search(text) or _BACKSLASH in text:
        return text
    return _LONE.sub(rb"\\ufffd", text.replace(rb"\\", _BACKSLASH)).replace(_BACKSLASH, rb"\\")


def parse_schema(text: str) -> dict[str, Any]:
    """The JSON schema in a text. Raises InvalidRequest if it is no JSON object."""
    try:
        schema = parse_json(text)
        if not isinstance(schema, dict):
            raise ValueError
    except ValueError:
        raise InvalidRequest("json_schema must be the text of a JSON object", param="json_schema") from None
    return pruned(schema, _is_unknown_format) if '"format"' in text else schema


def _is_unknown_format(key: str, value: Any) -> bool:
    """Whether no grammar has the format: JSON Schema takes it for an annotation."""
    return key == "format" and isinstance(value, str) and value not in _FORMATS


def pruned(schema: Any, drops: Callable[[str, Any], bool]) -> Any:
    """The JSON schema without the members that `drops` chooses by name and value, except in constants."""
    if isinstance(schema, list):
        return [pruned(one, drops) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):  # their keys are names, and no keywords
            found[key] = {name: pruned(one, drops) for name, one in value.items()}
        elif not drops(key, value):
            found[key] = value if key in _CONSTANTS else pruned(value, drops)
    return found


def check_unicode(value: Any) -> None:
    """Raise ValueError if a JSON value holds lone surrogates or NaN."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate is not Unicode text") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def check_shape(text: bytes) -> None:
    """Raise ValueError for JSON text that is not UTF-8, too deep, or has too many nodes or values.

    Parsing a megabyte of `[]` takes a fifth of a second and 30 MiB; counting takes milliseconds. In invalid JSON, the
    counts are right up to the first error.
    """
    if b"\0" in text:  # UTF-16: Python's parser accepts it, but its bytes can look like quotation marks
        raise ValueError("NUL bytes: JSON is UTF-8")
    if len(text) <= _SHORT and text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    marks = _outside_strings(_without_escapes(text))
    _check_nodes(marks)
    if np.count_nonzero(marks == ord(",")) >= MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    brackets = marks[(marks & 0xD9) == 0x59]
    # "[" and "{" lie two below "]" and "}", and have the second bit set.
    if ((brackets & 2).astype(np.int8) - 1).cumsum(dtype=np.int32).max(initial=0) > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} levels")


def check_texts(texts: Iterable[str]) -> None:
    """Raise ValueError if all texts together, parsed as JSON, would have too many nodes."""
    bare = map(_without_escapes, (text.encode() for text in texts))
    # A text with an unclosed string is not JSON.
    _check_nodes(_outside_strings(b",".join(text for text in bare if text.count(b'"') % 2 == 0)))


def _without_escapes(text: bytes) -> bytes:
    """JSON text without escaped quotation marks, so that every remaining one begins or ends a string."""
    if b"\\" not in text:
        return text
    short, count = _MISLEADING.subn(b"", text, _FEW)
    return short if count < _FEW else text.replace(b"\\\\", b"").replace(b'\\"', b"")


def _outside_strings(text: bytes) -> np.ndarray:
    """The structural bytes (brackets, colons, commas, number marks) of JSON text without escapes, uint8."""
    outside, at = [], 0
    for _ in range(_STRINGS if len(text) > _LONG else 0):  # the first strings are most of a body with long ones
        start = text.find(b'"', at)
        end = text.find(b'"', start + 1)
        if min(start, end) < 0:
            break
        outside.append(text[at:start])
        at = end + 1
    marks = np.frombuffer(b"".join((*outside, text[at:])).translate(None, _NO_MARKS), dtype=np.uint8)
    return marks[np.cumsum(marks == ord('"'), dtype=np.uint8) & 1 == 0]


def _check_nodes(marks: np.ndarray) -> None:
    if sum(np.count_nonzero(marks == node) for node in _NODES) > MAX_NODES:
        raise ValueError(f"more than {MAX_NODES} lists, objects, names and fractions")
