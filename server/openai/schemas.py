"""JSON schemas of tools, in a form that a grammar can follow: what no grammar can express asks for nothing."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

_TYPES = frozenset(("null", "boolean", "object", "array", "number", "string", "integer"))
_SUBSCHEMAS = frozenset(("items", "additionalItems", "additionalProperties"))
_LISTS = frozenset(("anyOf", "allOf", "oneOf", "prefixItems", "items"))
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Keywords by which an object may need properties that `properties` does not list.
_OPENING = frozenset(
    {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "then", "else", "not", "patternProperties"}
    | {"additionalProperties", "unevaluatedProperties", "minProperties", "propertyNames"}
    | {"dependencies", "dependentRequired", "dependentSchemas"}
)
_PREFIX = len("#/$defs/")
# Most characters of a request's expressions; reading one costs as much as so many characters.
_MOST_EXPRESSIONS, _COST = 1 << 15, 1 << 7
_MOST_COUNT, _MOST_NUMBER = (1 << 31) - 1, 1 << 63
# An expression within these limits is read in milliseconds. One beyond them may still be followed.
_MOST_READ, _MOST_SIZE = 1000, 10_000
_BEYOND = "too big"


@lru_cache(maxsize=1 << 10)
def _reads(keyword: str, expressions: tuple[str, ...]) -> bool:
    """Whether a grammar can follow `pattern` or `patternProperties` with these expressions."""
    from llguidance import LLMatcher, LLParserLimits  # takes long to import, and most servers see no such schema

    value = expressions[0] if keyword == "pattern" else {one: {} for one in expressions}
    source = LLMatcher.grammar_from_json_schema({"type": ["string", "object"], keyword: value})
    limits = LLParserLimits(
        initial_lexer_fuel=_MOST_READ,
        step_lexer_fuel=_MOST_READ,
        step_max_items=_MOST_READ,
        max_lexer_states=_MOST_READ,
        max_grammar_size=_MOST_SIZE,
        verbose_errors=False,
    )
    problem = LLMatcher.validate_grammar(source, limits=limits)
    return not problem or problem.startswith("WARNING") or _BEYOND in problem


class Expressions:
    """Tells which regular expressions of a request a grammar can follow; beyond a bound, none."""

    def __init__(self) -> None:
        self._left = _MOST_EXPRESSIONS

    def follow(self, keyword: str, *expressions: str) -> bool:
        """Whether a grammar can follow `pattern` or `patternProperties` with these expressions."""
        self._left -= sum(map(len, expressions)) + _COST * len(expressions)
        return self._left >= 0 and _reads(keyword, expressions)


def definitions_of(schema: dict[str, Any], name: str, expressions: Expressions) -> dict[str, Any]:
    """The schema of a tool's arguments under `name`, and the schemas to which it refers, under names of their own.

    References have the form `#/$defs/NAME`. An object that lists properties, and says nothing of others, has no others
    but those that it requires.
    """
    return _Definitions(schema, name, expressions).found


class _Definitions:
    def __init__(self, schema: dict[str, Any], name: str, expressions: Expressions):
        self._root, self._name, self._expressions = schema, name, expressions
        self._by_id = dict(_identified(schema))
        self._names = {id(schema): name}
        self._left = [schema]
        self.found: dict[str, Any] = {}
        while self._left:
            one = self._left.pop()
            self.found[self._names[id(one)]] = self._followable(one)
        # The arguments of a call are an object, whatever the schema says.
        own = {"type": "object"} | _closed(schema, self.found[name])
        self.found[name] = own if "object" in own["type"] else own | {"type": "object"}
        circles = _in_circles({place: set(_references(found)) for place, found in self.found.items()})
        for place in circles:
            self.found[place] = _uncircled(self.found[place], circles)
        _break_loops(circles, self.found)

    def _followable(self, schema: Any) -> Any:
        """The schema, with the keywords alone that a grammar follows; whatever is no schema allows anything."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            return {}
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if key in ("properties", "patternProperties") and isinstance(value, dict):
                found[key] = {name: self._followable(one) for name, one in value.items()}
            elif key in _SUBSCHEMAS and isinstance(value, dict | bool):
                found[key] = self._followable(value)
            elif key in _LISTS and isinstance(value, list) and value:
                found[key] = [self._followable(one) for one in value]
            elif key == "$ref" and (target := self._resolve(value)) is not None:
                found[key] = f"#/$defs/{self._name_of(target)}"
            elif key == "pattern" and isinstance(value, str) and self._expressions.follow(key, value):
                found[key] = value
            elif key in _VALUES and (one := _VALUES[key](value)) is not None:
                found[key] = one
        if "const" in schema and _fits(schema["const"]):
            found["const"] = schema["const"]
        # A grammar cannot tell expressions apart that overlap.
        if (names := tuple(found.get("patternProperties", ()))) and not self._expressions.follow(
            "patternProperties", *names
        ):
            del found["patternProperties"]
            found.pop("additionalProperties", None)  # it speaks of all other properties
        return found

    def _name_of(self, target: dict[str, Any]) -> str:
        if id(target) not in self._names:
            self._names[id(target)] = f"{self._name}.{len(self._names)}"
            self._left.append(target)
        return self._names[id(target)]

    def _resolve(self, reference: Any) -> dict[str, Any] | None:
        """The schema to which a reference leads; None if there is none in this document."""
        if not isinstance(reference, str):
            return None
        base, _, fragment = reference.partition("#")
        at: Any = self._root if not base else self._by_id.get(base)
        if fragment and not fragment.startswith("/"):
            at = self._by_id.get(f"#{fragment}")
        for part in fragment.split("/")[1:]:
            step = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and step.isascii() and step.isdigit() and int(step[:9]) < len(at):
                at = at[int(step[:9])]
            else:
                at = at.get(step) if isinstance(at, dict) else None
        return at if isinstance(at, dict) else None


def _references(found: Any) -> Iterator[str]:
    """The names of the definitions to which a schema refers."""
    if isinstance(found, list):
        for one in found:
            yield from _references(one)
    elif isinstance(found, dict):
        for key, value in found.items():
            if key == "$ref" and isinstance(value, str):
                yield value[_PREFIX:]
            elif key in ("properties", "patternProperties"):
                yield from _references([*value.values()])
            elif key not in ("enum", "const"):
                yield from _references(value)


def _in_circles(refers: dict[str, set[str]]) -> set[str]:
    """Definitions that refer to themselves by others, or stand between such definitions.

    `refers`: the definitions to which each definition refers.
    """
    left = set(refers)
    referring: dict[str, set[str]] = {name: set() for name in refers}
    for name, targets in refers.items():
        for target in targets:
            referring[target].add(name)
    for there, back in ((refers, referring), (referring, refers)):
        counts = {name: len(there[name] & left) for name in left}
        ends = [name for name in left if not counts[name]]
        while ends:
            left.discard(end := ends.pop())
            for name in back[end] & left:
                counts[name] -= 1
                if not counts[name]:
                    ends.append(name)
    return left


def _uncircled(found: Any, circles: set[str]) -> Any:
    """A part of a definition, in which references to those in circles stand alone: no grammar merges a circle."""
    if isinstance(found, list):
        return [_uncircled(one, circles) for one in found]
    if not isinstance(found, dict):
        return found
    members = found.get("allOf")
    for one in (found, *(members if isinstance(members, list) else ())):
        if isinstance(one, dict) and isinstance(name := one.get("$ref"), str) and name[_PREFIX:] in circles:
            return {"$ref": name}
    return {key: _of_keyword(key, value, lambda one: _uncircled(one, circles)) for key, value in found.items()}


def _of_keyword(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """The value of a keyword, with the schemas in it changed."""
    if key in ("properties", "patternProperties"):
        return {name: change(one) for name, one in value.items()}
    return value if key in ("enum", "const") else change(value)


def _break_loops(places: set[str], found: dict[str, Any]) -> None:
    """Let one definition of each loop of nothing but references allow anything. Every definition is visited once."""
    done = set[str]()
    for place in places:
        path = set[str]()
        while place not in done and isinstance(one := found[place], dict) and one.keys() == {"$ref"}:
            done.add(place)
            path.add(place)
            place = one["$ref"][_PREFIX:]
        if place in path:
            found[place] = {}


def _identified(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas within a schema that have a name: an address, or `#` and an anchor."""
    if isinstance(schema, list):
        for one in schema:
            yield from _identified(one)
    if isinstance(schema, dict):
        for key, sign in (("$id", ""), ("id", ""), ("$anchor", "#"), ("$dynamicAnchor", "#")):
            if isinstance(name := schema.get(key), str) and name:
                yield sign + name.removesuffix("#"), schema
        for one in schema.values():
            yield from _identified(one)


def _closed(schema: dict[str, Any], followable: dict[str, Any]) -> dict[str, Any]:
    if "properties" not in followable or not _OPENING.isdisjoint(schema):
        return followable
    properties = followable["properties"] | {
        name: {} for name in followable.get("required", ()) if name not in followable["properties"]
    }
    return followable | {"properties": properties, "additionalProperties": False}


def _types(value: Any) -> list[str] | None:
    names = value if isinstance(value, list) else [value]
    return [name.lower() for name in names if isinstance(name, str) and name.lower() in _TYPES] or None


def _enum(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) and value and _fits(value) else None


def _required(value: Any) -> list[str] | None:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value <= _MOST_COUNT else None


def _number(value: Any) -> int | float | bool | None:
    return value if isinstance(value, int | float) and -_MOST_NUMBER < value < _MOST_NUMBER else None


def _factor(value: Any) -> int | float | bool | None:
    return _number(value) or None


def _fits(value: Any) -> bool:
    """Whether all integers in a value have 64 bits."""
    if isinstance(value, list | dict):
        return all(map(_fits, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or -_MOST_NUMBER <= value < _MOST_NUMBER


# By keyword, a function that returns what a grammar follows of its value; None: nothing.
_VALUES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_COUNTS, _count),
    **dict.fromkeys(_NUMBERS, _number),
    "multipleOf": _factor,
    "type": _types,
    "enum": _enum,
    "required": _required,
    "format": _text,
}
