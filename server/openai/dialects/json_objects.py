"""Calls as JSON objects, one or several, as the whole answer (Llama)."""

import json
import re
from contextlib import suppress
from typing import Any

from runtime.json_text import parse_json
from server.openai.dialects.dialect import Calls, Dialect
from server.openai.dialects.parameters import Schemas

# A call in JSON that has begun: its name, and the beginning of its arguments.
_BEGUN = re.compile(r'\[?\s*\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*)', re.DOTALL)
_BETWEEN = re.compile(r'\}\s*\{(?=\s*"name"\s*:)')
_NEXT = re.compile(r',\s*(?=\{\s*"name"\s*:)')


def read_json(text: str, schemas: Schemas, cut: bool) -> Calls:
    """JSON objects with name and arguments, in a list or not; with `cut` also the beginning of the last one."""
    try:
        value = parse_json(text)
    except ValueError:
        text = _BETWEEN.sub("},{", text.strip())
        text = text if text.startswith("[") else f"[{text}"
        try:
            value = parse_json(f"{text}]")
        except ValueError:
            return _read_cut(text, schemas) if cut else []
    entries = value if isinstance(value, list) else [value]
    calls = [(entry.get("name"), _arguments(entry)) for entry in entries if isinstance(entry, dict)]
    return [(name, given) for name, given in calls if isinstance(name, str)] if len(calls) == len(entries) else []


def _read_cut(text: str, schemas: Schemas) -> Calls:
    for comma in reversed([*_NEXT.finditer(text)][-4:]):  # some may stand within strings
        if whole := read_json(f"{text[: comma.start()]}]", schemas, False):
            return whole + _read_cut(text[comma.end() :], schemas)
    if (found := _BEGUN.match(text)) is None:
        return []
    given = found[2]
    with suppress(ValueError, RecursionError):
        given = given[: json.JSONDecoder().raw_decode(given)[1]]  # the call may go on behind its arguments
    return [(found[1], given)]


def _arguments(entry: dict[str, Any]) -> str:
    arguments = entry.get("arguments", entry.get("parameters", {}))
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


WHOLE = Dialect(read_json, (), is_json=True)
