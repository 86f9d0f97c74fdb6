"""The answer's format: OpenAI's `response_format`, and the equivalent fields of vLLM, SGLang and llama.cpp."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runtime.errors import InvalidRequest
from server.http import fields
from server.http.body import Body, JsonObject, JsonText, Text

MAX_CHOICES = 1024

Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]

# At most one item: the kind (json_schema, regex or grammar) and text of a constraint of the engine.
Constraint = dict[str, str]


class ResponseFormat(Body):
    """The answer's format. `json_schema` is an object with a name and the schema; `schema` is the schema itself."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonObject | None = None
    schema_: JsonObject | None = Field(None, alias="schema", description="for types json_object and json_schema")
    pattern: Text | None = Field(None, description="for type regex")
    grammar: Text | None = Field(None, description="EBNF or Lark")

    def constraint(self) -> Constraint:
        """The constraint on the answer; empty if any text is allowed. Raises InvalidRequest."""
        if self.type == "text":
            return {}
        if self.type == "json_object":
            return {"json_schema": json.dumps(self.schema_ or {"type": "object"})}
        if self.type == "json_schema":
            schema = self.schema_ or (self.json_schema or {}).get("schema")
            return {"json_schema": json.dumps(_needed(schema if isinstance(schema, dict) else None, "json_schema"))}
        name, text = ("regex", self.pattern) if self.type == "regex" else ("grammar", self.grammar)
        return {name: _needed(text, "pattern" if name == "regex" else name)}


def _needed(value: Any, name: str) -> Any:
    if value is None:
        at = "json_schema.schema" if name == "json_schema" else name
        raise InvalidRequest(f"this type needs {at}", param=f"response_format.{at}")
    return value


class Constrained(Body):
    """Fields that constrain the answer; at most one may be given. vLLM's `structured_outputs` has the same fields."""

    json_schema: JsonText | None = None
    regex: Text | None = None
    grammar: Text | None = Field(None, description="EBNF or Lark")
    choice: Choices | None = Field(None, description="the answer is one of these texts")

    def constraints(self) -> list[Constraint]:
        """All given constraints."""
        given = {"json_schema": self.json_schema, "regex": self.regex, "grammar": self.grammar}
        given["choice"] = _one_of(self.choice) if self.choice else None
        return [{name: text} for name, text in given.items() if text is not None]


class StructuredOutputs(Constrained):
    """vLLM's fields for the answer's format; exactly one of them."""

    ALIASES: ClassVar[Mapping[str, str]] = {"json": "json_schema"}
    IGNORED = frozenset({"disable_fallback", "_backend"})
    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = {
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": ("",),
        "structural_tag": ("",),
    }

    json_object: bool = False

    def constraints(self) -> list[Constraint]:
        return super().constraints() + ([{"json_schema": '{"type": "object"}'}] if self.json_object else [])


def only(constraints: list[Constraint]) -> Constraint:
    """The only constraint of a request; empty without one. Raises InvalidRequest if there are several."""
    if len(constraints) > 1:
        first, second = (next(iter(one)) for one in constraints[:2])
        raise InvalidRequest(f"the answer can follow only one format: {first} or {second}", param=second)
    return {"grammar" if name == "choice" else name: text for one in constraints for name, text in one.items()}


def _one_of(texts: list[str]) -> str:
    """A Lark grammar that accepts exactly these texts."""
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
