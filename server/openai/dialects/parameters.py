"""The parameters of tools, and their values as JSON text."""

import json
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

from runtime.json_text import parse_json

# Most parts of a tool's schema that are read for the types of its parameters, and least for one parameter; most
# characters of a reference within a schema.
_MOST_PARTS, _LEAST_PARTS, _MOST_CHARACTERS = 1 << 14, 1 << 6, 1 << 10


class Parameters:
    """The parameters of a tool.

    Args:
        schema: the JSON schema of the tool's arguments; it may be long.
    """

    def __init__(self, schema: Mapping[str, Any]):
        self._schema, self._kinds = schema, dict[str, set[str]]()
        self._left = _MOST_PARTS

    def kinds(self, name: str) -> set[str]:
        """The types that a parameter may have. They are read once, because an answer may have thousands of calls."""
        properties = self._schema.get("properties")
        if not isinstance(properties, dict) or name not in properties:
            return set()
        if name not in self._kinds:
            self._kinds[name], parts = _kinds(properties[name], self._schema, max(self._left, _LEAST_PARTS))
            self._left -= parts
        return self._kinds[name]


Schemas = Mapping[str, Parameters]
UNKNOWN = Parameters({})


def typed(given: Iterable[tuple[str, str]], parameters: Parameters) -> str:
    """Arguments as JSON text: strings as they are, values of other types read as JSON."""

    def value(name: str, text: str) -> Any:
        kinds = parameters.kinds(name)
        if "string" in kinds and (text not in ("null", "None") or "null" not in kinds):
            return text
        try:
            return parse_json({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
        except ValueError:
            return text

    return json.dumps({name: value(name, text) for name, text in given}, ensure_ascii=False)


def _kinds(schema: Any, root: Mapping[str, Any], most: int) -> tuple[set[str], int]:
    """The types that the `most` first parts of a schema name, themselves or by references; the number of parts read."""
    kinds, left = set[str](), [schema]
    seen, parts = set[str](), 0
    while left and parts < most:
        one = left.pop()
        parts += 1
        if not isinstance(one, dict):
            continue
        types, values, *unions = (one.get(key, []) for key in ("type", "enum", "anyOf", "oneOf", "allOf"))
        types, values = types if isinstance(types, list) else [types], values if isinstance(values, list) else []
        kinds.update(kind for kind in types[:most] if isinstance(kind, str))
        for value in [*values[:most], one.get("const", 0)]:
            parts += 1
            kinds |= {"string"} if isinstance(value, str) else {"null"} if value is None else set()
        for union in unions:
            left += union[:most] if isinstance(union, list) else []
        reference = one.get("$ref")
        if isinstance(reference, str) and len(reference) <= _MOST_CHARACTERS and reference not in seen:
            seen.add(reference)
            left.append(reduce(_member, reference.split("/")[1:], root))
    return kinds, parts


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
