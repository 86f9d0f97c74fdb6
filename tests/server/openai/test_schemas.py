"""Schemas of tools in the form that grammars follow: what they keep, what they drop, and where references lead."""

import json
import sys

import pytest
from llguidance import LLMatcher

from runtime.json_text import pruned
from server.openai.schemas import Expressions, definitions_of


def definitions(schema: dict) -> dict:
    """The definitions, which a grammar can follow."""
    found = definitions_of(schema, "t", Expressions())
    whole = {"$ref": "#/$defs/t", "$defs": json.loads(json.dumps(found)), "x-guidance": {"lenient": True}}
    problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(whole))
    assert not problem or problem.startswith("WARNING"), problem
    return found


def member(given) -> dict:
    return definitions({"type": "object", "properties": {"a": given}})["t"]["properties"]["a"]


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        *(("pattern", one) for one in ("(?=a)b", "^(?!x).*$", r"(a)\1", r"\bfoo\b", "(a", r"^a\Z", None, 5)),
        *(("maxLength", one) for one in (9007199254740991, -1, 5.5, "5", True, None)),
        *(("minItems", one) for one in (1 << 40, None)),
        *(("$ref", one) for one in ("#/$defs/x", "https://a.example/x.json", "#none", "x", 5, None)),
        *(("type", one) for one in ("date", "any", None, {"a": 1}, [])),
        *(("enum", one) for one in (None, [], {"a": 1}, [1 << 70])),
        *(("properties", one) for one in (None, [])),
        *(("required", one) for one in (None, "a", True)),
        *(("items", one) for one in (None, "string")),
        *(("anyOf", one) for one in (None, [], {})),
        ("additionalProperties", None),
        ("minimum", "0"),
        ("multipleOf", 0),
        ("maximum", 1 << 70),
        ("const", 1 << 70),
        ("$id", "https://a.example/x"),
        ("$schema", "foo"),
        ("if", {"type": "string"}),
        ("description", "d"),
    ],
)
def test_what_no_grammar_follows_asks_for_nothing(keyword, value):
    assert member({keyword: value}) == {}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"pattern": r"^\d{3}$", "format": "weird"}, {"pattern": r"^\d{3}$", "format": "weird"}),
        ({"type": "STRING", "maxLength": 5.0}, {"type": ["string"], "maxLength": 5}),
        ({"type": ["string", "date", "null"]}, {"type": ["string", "null"]}),
        ({"required": ["a", 5]}, {"required": ["a"]}),
        ({"anyOf": [{"type": "integer"}, "string", None]}, {"anyOf": [{"type": ["integer"]}, {}, {}]}),
        ({"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False},) * 2,
        ({"patternProperties": {"^(?!a)": {}}, "additionalProperties": False}, {}),
        ({"patternProperties": {"^a": {}, "^ab": {}}, "type": "object"}, {"type": ["object"]}),
        ({"const": {"$ref": "#/components/x", "type": None}}, {"const": {"$ref": "#/components/x", "type": None}}),
        ({"enum": [{"$ref": "#"}, None]}, {"enum": [{"$ref": "#"}, None]}),
        ({"const": None, "default": {"$ref": "#"}, "examples": [{"$ref": "#"}]}, {"const": None}),
        ({"properties": {"$ref": {"const": 1}, "enum": {"type": "null"}}},) * 2,
        (True, True),
        (None, {}),
    ],
)
def test_what_a_grammar_follows_stays(given, kept):
    found = json.loads(json.dumps(member(given)).replace('["null"]', '"null"'))
    assert found == json.loads(json.dumps(kept).replace('["null"]', '"null"'))


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"child": {"$ref": "#"}}},
        {"$id": "https://a.example/t", "properties": {"child": {"$ref": "https://a.example/t#"}}},
        {"properties": {"child": {"$ref": "#", "type": "object", "description": "d"}}},
        {"properties": {"child": {"allOf": [{"$ref": "#"}], "type": "object"}}},
    ],
)
def test_a_tool_that_refers_to_itself(schema):
    found = definitions({"type": "object", **schema})
    assert found == {
        "t": {"type": ["object"], "properties": {"child": {"$ref": "#/$defs/t"}}, "additionalProperties": False}
    }


@pytest.mark.parametrize(
    ("reference", "definitions_given"),
    [
        ("#/$defs/a~1b%20c", {"$defs": {"a/b c": {"type": "null"}}}),
        ("#/definitions/x/anyOf/1", {"definitions": {"x": {"anyOf": [True, {"type": "null"}]}}}),
        ("#/components/x", {"components": {"x": {"type": "null"}}}),
        ("#x", {"$defs": {"y": {"$anchor": "x", "type": "null"}}}),
        ("/x", {"$defs": {"y": {"$id": "/x", "type": "null"}}}),
    ],
)
def test_where_references_lead(reference, definitions_given):
    found = definitions({"properties": {"a": {"$ref": reference}}, **definitions_given})
    assert found["t"]["properties"] == {"a": {"$ref": "#/$defs/t.1"}}
    assert found["t.1"] == {"type": ["null"]}


def test_circles():
    found = definitions({"$ref": "#/$defs/Node", "$defs": {"Node": NODE}})
    assert found["t.1"] == {"type": ["object"], "properties": {"next": {"$ref": "#/$defs/t.1"}}}
    assert definitions({"$ref": "#"})["t"] == {}
    loop = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a", "type": "object"}}
    assert definitions({"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": loop})["t"]["properties"]


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"properties": {"a": True}}, {"properties": {"a": True}, "additionalProperties": False}),
        (
            {"properties": {"body": {}}, "required": ["title", "body"]},
            {"properties": {"body": {}, "title": {}}, "required": ["title", "body"], "additionalProperties": False},
        ),
        *(({"properties": {"a": True}, **more}, {"properties": {"a": True}, **kept}) for more, kept in (
            ({"additionalProperties": True}, {"additionalProperties": True}),
            ({"allOf": [{"required": ["b"]}]}, {"allOf": [{"required": ["b"]}]}),
            ({"minProperties": 2}, {"minProperties": 2}),
            ({"then": {"required": ["b"]}}, {}),
            ({"dependentRequired": {"a": ["b"]}}, {}),
        )),
        ({"required": ["a"]}, {"required": ["a"]}),
        ({}, {}),
    ],
)  # fmt: skip
def test_properties_that_may_follow(schema, closed):
    assert definitions(schema)["t"] == {"type": "object", **closed}


@pytest.mark.parametrize("kind", ["array", ["array", "null"], "string"])
def test_arguments_are_an_object_whatever_the_schema_says(kind):
    assert definitions({"type": kind})["t"]["type"] == "object"


def test_expressions_beyond_a_bound_are_not_followed():
    """They would cost seconds to read."""
    many = {"type": "object", "properties": {f"a{i}": {"pattern": f"^{i}"} for i in range(1000)}}
    found = definitions(many)["t"]["properties"].values()
    assert 0 < sum("pattern" in one for one in found) < 300


def test_names_of_properties_are_no_keywords():
    weird = {"type": "string", "format": "weird"}
    schema = {"properties": {"enum": weird, "const": weird, "format": weird}, "const": weird, "default": weird}
    text = {"type": "string"}
    wanted = {"properties": dict.fromkeys(("enum", "const", "format"), text), "const": weird, "default": weird}
    assert pruned(schema, lambda key, value: key == "format") == wanted


def calls_for_circle(size: int) -> int:
    """The function calls that a circle of so many references costs."""
    properties = {f"p{i}": {"$ref": f"#/properties/p{(i + 1) % size}"} for i in range(size)}
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = definitions_of({"type": "object", "properties": properties}, "t", Expressions())
    finally:
        sys.setprofile(None)
    assert [one for one in found.values() if one == {}] == [{}]
    return calls


def test_the_cost_of_a_circle_grows_with_its_size():
    assert calls_for_circle(400) < 3 * calls_for_circle(200)
