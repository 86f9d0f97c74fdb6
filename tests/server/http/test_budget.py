"""No body costs more than its length allows: the worst value for each field of each route, 64 KiB long.

The application runs in process, with the real validation, tokenizer and chat template, up to the engine.
"""

import asyncio
import gc
import json
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fastapi import FastAPI

from runtime.config import Config
from runtime.errors import Overloaded
from runtime.features.registry import open_preparers
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output_processor import OutputProcessor
from runtime.frontend.preparer import ServedModel
from runtime.json_text import MAX_NODES
from runtime.models.tokenizer import Tokenizer
from runtime.protocol import ModelInfo
from server.app import create_app
from server.errors import NotFound
from server.features.chunks.schemas import SchemaStore
from server.http.context import find

MIB = 1 << 20
# Calls of functions, Python's and C's, for one value of a field and for a body that is worst as a whole; bytes.
# A call for each element of a list takes more. Calls do not depend on the processor, as seconds do.
MOST_CALLS, MOST_CALLS_WHOLE, MOST_BYTES = 10_000, 500_000, 4 * MIB
SIZE, NODES = 1 << 16, MAX_NODES // 4
ROUTES = ("/generate", "/tokenize", "/detokenize", "/v1/chat/completions", "/v1/completions", "/cache/pin")
ROUTES = (*ROUTES, "/v1/schemas", "/v1/documents", "/abort_request", "/v1/responses", "/v1/responses/input_tokens")
ROUTES = (*ROUTES, "/v1/messages", "/v1/messages/count_tokens", "/cache/search")
ROUTES = (*ROUTES, "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/infill")


# Routes whose fields are all fields of another one.
SAME_FIELDS = ("/v1/messages/count_tokens", "/v1/responses/input_tokens")


def fill(element: str, ends: str = "[]", most: int = MIB, last: str = "", size: int = SIZE) -> str:
    """A list of as many equal elements as fit, and another last one."""
    count = min((size - 2 - len(last)) // (len(element) + 1), most)
    return f"{ends[0]}{','.join([element] * count + [last] * bool(last))}{ends[1]}"


def names(element: str, most: int) -> str:
    return "{" + ",".join(element % i for i in range(most)) + "}"


def padded(short: str) -> str:
    """A list, made longer by numbers."""
    return f"{short[:-1]},{fill('0')[1 : SIZE - len(short)].rstrip(',')}]"


WORST = {
    "lists": padded(fill("[]", most=NODES)),
    "objects": padded(fill("{}", most=NODES)),
    "deep lists": padded(fill("[" * 50 + "]" * 50, most=NODES // 50)),
    "deep objects": padded(fill('{"":' * 50 + "0" + "}" * 50, most=NODES // 100)),
    "too many lists": fill("[" * 50 + "]" * 50, most=MAX_NODES // 50, size=MIB),
    "unknown": names('"%x":0', NODES),
    "null": names('"%x":null', NODES),
    "decimal": names('"%d":0', NODES),
    "repeated": fill('"a":0', "{}", NODES),
    "fractions": '{"enum":' + padded(fill("2.2250738585072011e-308", most=NODES // 2)) + "}",
    "texts": fill('""'),
    "negative": fill("-1"),
    "digits": fill("9" * 4300),
    "late": fill("0", last='""'),
    "late text": fill('"a"', last="0"),
    "late in a batch": f"[{fill('0', last='')[:-1000]}0,-1]]",
    "batch": fill(fill("0", most=600), most=2000),
    "one number": "9" * SIZE,
    "one fraction": "0." + "1" * (SIZE - 2),
    "long": f'"{"a" * (SIZE - 2)}"',
    "long name": '{"' + "a" * (SIZE - 6) + '":0}',
    "escapes": '"' + "\\u20ac" * (SIZE // 6 - 1) + '"',
    "surrogates": '"' + "\\ud800" * (SIZE // 6 - 1) + '"',
    "quoted": '"' + fill("[]")[2:-2] + '"',
    "quoted braces": '"' + "{" * (SIZE - 2) + '"',
}
ANY = ("unknown",)
SCALARS = ("integer", "number", "boolean", "any")
TEXTS = (*ANY, "lists", "texts", "late text", "long")
IDS = ("lists", "objects", "deep lists", "negative", "late", "digits", "batch", "late in a batch")
OBJECTS = ("objects", "deep objects", "unknown", "null", "repeated")
# The worst values that were found, for each kind of field in the OpenAPI document.
TABLE = {
    "body": (*OBJECTS, "too many lists", "decimal", "one number", "texts", "long name"),
    "integer": ANY,
    "number": ANY,
    "boolean": ANY,
    "string": (*ANY, "escapes", "long"),
    "any": ("deep lists",),
    "object": OBJECTS,
    "map": (*OBJECTS, "decimal", "fractions"),
    **dict.fromkeys(("boolean|list of boolean", "integer|list of integer"), ("lists", "texts", "digits", "batch")),
    "list of string": TEXTS,
    "list of string|string": TEXTS,
    "list of integer": IDS,
    "list of integer|list of list of integer": IDS,
    "list of integer|list of list of integer|list of string|string": {*TEXTS, *IDS},
    "list of object": OBJECTS,
    "list of object|object": OBJECTS,
    "list of list of object|list of object": (*OBJECTS, "batch", "lists"),
    "list of object|string": (*OBJECTS, "quoted", "quoted braces", "surrogates"),
    "list of list of string": (*TEXTS, "objects", "batch"),
    "list of list of string|string|string": (*TEXTS, "objects", "batch"),
    "object|string": OBJECTS,
    "map|string": (*OBJECTS, "fractions", "quoted", "quoted braces"),
}
# Of another type than the field they cost what it takes to read them, whatever the field: once a route and kind.
ALIEN = {
    **dict.fromkeys(("integer", "number", "boolean", "string"), ANY),
    **dict.fromkeys(("object", "map"), ("objects", "deep objects")),
}


def dumped(body: dict) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def conversation(*arguments: str, **fields) -> bytes:
    calls = [{"function": {"name": "f", "arguments": text}} for text in arguments]
    turns = [{"role": "assistant", "tool_calls": calls[i : i + 128]} for i in range(0, len(calls), 128)]
    return dumped({"model": "smollm2-135m-instruct", "messages": turns or [{"role": "user", "content": "x"}], **fields})


def tool(**schema) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def union(*modules: str) -> bytes:
    return json.dumps({"pml": f"<schema name='a'><union>{''.join(modules)}</union></schema>"}).encode()


PART = {"type": "text", "text": ""}
DOCUMENT = {"text": "x"}
# Worst bodies whose fields are worst together.
WHOLE = {
    "many calls": conversation(*["{}"] * 10_000),
    "nested arguments": conversation(*["[" * 33 + "]" * 33] * 9_000),
    "deep arguments": conversation(*[fill("[" * 50 + "]" * 50, most=1300, size=MIB)] * 7),
    "arguments of fractions": conversation(fill("0.1", size=MIB // 2)),
    "arguments of numbers": conversation(fill("0", size=MIB // 2)),
    "many messages": conversation(messages=[{"role": "user", "content": "x"}] * 4096),
    "many parts": conversation(messages=[{"role": "user", "content": [PART] * 4000}] * 5),
    "many documents": conversation(documents=[DOCUMENT] * 4096),
    "many parts with documents": conversation(
        messages=[{"role": "user", "content": [{"type": "document", "document": DOCUMENT}] * 4000}] * 4
    ),
    "tools of fractions": conversation(tools=[tool(enum=[0.1] * 400)] * 128, tool_choice="required"),
    "tools of references": conversation(tools=[tool(a=[{"$ref": "#/"}] * 150)] * 128, tool_choice="required"),
    "tools of numbers": conversation(tools=[tool(enum=[0] * 3900)] * 128, tool_choice="required"),
    "ignored": conversation(metadata=[0] * 500_000),
}


ANTHROPIC = {"model": "smollm2-135m-instruct", "max_tokens": 1}
CONTROL = {"cache_control": {"type": "ephemeral"}}
BLOCK = {"type": "text", "text": "x"}
KEPT = [{**BLOCK, **CONTROL}] * 4
MESSAGES = {
    "breakpoints in many messages": [{"role": "user", "content": "x"}] * 4095 + [{"role": "user", "content": KEPT}],
    "breakpoints in many blocks": [{"role": "user", "content": [*KEPT, *[BLOCK] * 4000]}] * 1,
    "too many breakpoints": [{"role": "user", "content": KEPT * 1000}],
    "breakpoints behind a long text": [{"role": "user", "content": [{**BLOCK, "text": "and so on " * 1900}, *KEPT]}],
    "calls": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "f", "input": {}, **CONTROL}] * 4}
    ]
    * 1000,
}


# Worst schemas; `test_pml.py` has those that are refused.
SCHEMAS = {
    "many modules": union(*(f"<module name='m{i}'>x</module>" for i in range(11_000))),
    "long modules": union(*(f"<module name='m{i}'>{'and so on ' * 8}</module>" for i in range(3_000))),
    "parameters": union(*(f"<module name='m{i}'><param name='p' len='150'/></module>" for i in range(5_000))),
}


def called(arguments: str) -> dict:
    return {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}


ITEMS = {
    "many calls": [called("{}")] * 4096,
    "nested arguments": [called("[" * 33 + "]" * 33)] * 4096,
    "deep arguments": [called(fill("[" * 50 + "]" * 50, most=1300, size=MIB))] * 7,
    "many references": [{"type": "item_reference", "id": "a"}] * 4096,
    "many texts": [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 4000}] * 5,
    "many system messages": [{"role": "developer", "content": "x"}] * 4096,
}
SEGMENTS = {
    "many segments": {"segments": [{"text": "x"}, {"document": DOCUMENT}] * 2048},
    "many prompts": {"segments": [[{"document": DOCUMENT}] * 30] * 1000},
    "long documents": {"segments": [{"document": {"text": "and so on " * 195}}] * 512},
}


class Unreached(AsyncEngine):
    """An engine that takes no requests. Its context is short, so that long texts are refused by their length."""

    def __init__(self, tokenizer: Tokenizer, path: Path):
        super().__init__(Config())
        self.info = ModelInfo("smollm2-135m-instruct", "", "", 49152, 512, [2], "", "", "", 16, 4096)
        self.tokenizer = tokenizer
        preparers = open_preparers(ServedModel(self.config, path, tokenizer, self.info))
        inputs = InputProcessor(self.info, tokenizer, self.config.scheduler, preparers)
        self._frontend = OutputProcessor(inputs, self._send)

    def _send(self, message) -> None:
        raise Overloaded("the engine was reached")


@pytest.fixture(scope="module")
def app(tokenizer, default_model_dir) -> Iterator[FastAPI]:
    app = create_app(Unreached(tokenizer, default_model_dir), Config(), [])
    asyncio.run(ask(app, "/tokenize", conversation()))  # the first one compiles the chat template
    gc.collect()
    gc.freeze()  # other tests' objects
    yield app
    gc.unfreeze()


@dataclass
class Fields:
    """The fields of the bodies in an OpenAPI document: their names, kinds, and bodies with a value in their place.

    Routes share models. A scalar field of one costs the same everywhere, and comes once; so does each field of a model
    within another one: the worst values of all of them together stand in tables of their own.
    """

    document: dict
    seen: list = field(default_factory=list)
    here: list = field(default_factory=list)

    def options(self, schema: dict) -> list[dict]:
        if "$ref" in schema:
            return self.options(self.document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]])
        several = schema.get("anyOf") or schema.get("oneOf")
        return [option for one in several for option in self.options(one)] if several else [schema]

    def kind(self, schema: dict) -> str:
        kinds = set()
        for option in self.options(schema):
            kind = option.get("type", "any")
            if kind == "array":
                kind = f"list of {self.kind(option['items'])}"
            kinds.add("map" if kind == "object" and "properties" not in option else kind)
        return "|".join(sorted(kinds - {"null"}))

    def least(self, schema: dict):
        """A valid value."""
        option = self.options(schema)[0]
        if option.get("type") == "object":
            return {name: self.least(option["properties"][name]) for name in option.get("required", ())}
        least = {"string": "x", "array": [], "integer": 1}.get(option.get("type"))
        return option.get("const", option.get("enum", [least])[0])

    def walk(self, schema: dict, within: bool = False) -> Iterator[tuple[str, str, Callable]]:
        for option in self.options(schema):
            if option.get("type") == "array":
                for path, kind, place in self.walk(option["items"], within):
                    yield f"[].{path}", kind, lambda value, place=place: [place(value)]
            if "properties" in option and option in self.here:
                continue
            known = option in self.seen
            self.seen.append(option)
            self.here.append(option)
            for name, inner in option.get("properties", {}).items():
                if known and (within or self.kind(inner) in SCALARS):
                    continue
                given = {**self.least(option), **option.get("example", {})}
                rest = {other: given[other] for other in option.get("required", ()) if other != name}
                yield name, self.kind(inner), lambda value, name=name, rest=rest: {**rest, name: value}
                for path, kind, place in self.walk(inner, within=True):
                    at = f"{name}.{path}"
                    yield at, kind, lambda value, name=name, rest=rest, place=place: {**rest, name: place(value)}

    def of(self, path: str) -> Iterator[tuple[str, str, Callable]]:
        (method,) = (one for one in self.document["paths"][path].values() if "requestBody" in one)
        schema = method["requestBody"]["content"]["application/json"]["schema"]
        yield "", "body", lambda value: value
        if path not in SAME_FIELDS:
            self.here.clear()
            yield from self.walk(schema)


async def ask(app: FastAPI, path: str, body: bytes) -> tuple[int, int]:
    """Status, and calls of functions in all threads."""
    messages, sent, calls = [{"type": "http.request", "body": body, "more_body": False}], [], 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    async def receive():
        return messages.pop() if messages else await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path}
    scope |= {"raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [], "client": ("", 1)}
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        await app(scope, receive, send)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sent[0]["status"], calls


def check(app: FastAPI, path: str, body: bytes, name: str, most: int = MOST_CALLS) -> None:
    assert len(body) <= MIB
    asyncio.run(ask(app, path, b"{}"))  # a route's first request builds the route
    status, calls = asyncio.run(ask(app, path, body))
    assert status in (200, 400, 404, 503), name
    assert calls <= most, name


@pytest.fixture(scope="module")
def bodies(app) -> dict[str, list[tuple[str, str, str]]]:
    """Field, value, and body with a place for the value, by route."""
    fields, found = Fields(app.openapi()), {}
    for path in ROUTES:
        found[path], seen = [], set()
        for name, kind, put in fields.of(path):
            values = [value for value in TABLE[kind] if kind not in seen or value not in ALIEN.get(kind, ())]
            found[path] += [(name, value, json.dumps(put("HERE"))) for value in values]
            seen.add(kind)
    return found


def filled(body: str, value: str) -> bytes:
    return body.replace('"HERE"', WORST[value]).encode()


def test_the_table_has_every_route(app):
    assert {path for path, methods in app.openapi()["paths"].items() if "requestBody" in str(methods)} == {*ROUTES}


@pytest.mark.parametrize("path", ROUTES)
def test_the_worst_value_of_each_field(app, bodies, path):
    for name, value, body in bodies[path]:
        check(app, path, filled(body, value), f"{name}: {value}")


WORST_BODIES = {
    **{name: ("/v1/chat/completions", body) for name, body in WHOLE.items()},
    **{f"items, {name}": ("/v1/responses", dumped({"input": items})) for name, items in ITEMS.items()},
    **{f"segments, {name}": ("/generate", dumped(body)) for name, body in SEGMENTS.items()},
    **{name: ("/v1/messages", dumped({**ANTHROPIC, "messages": turns})) for name, turns in MESSAGES.items()},
    **{f"schemas, {name}": ("/v1/schemas", body) for name, body in SCHEMAS.items()},
}


@pytest.mark.parametrize("name", WORST_BODIES)
def test_the_worst_bodies(app, name):
    check(app, *WORST_BODIES[name], name, MOST_CALLS_WHOLE)
    with suppress(NotFound):
        find(app, SchemaStore).remove("", "a")


@pytest.mark.parametrize("value", ["lists", "deep lists", "deep objects", "unknown", "fractions", "texts", "batch"])
def test_the_memory_of_the_worst_values(app, bodies, value):
    """Of those that make most objects, in the first field that has them."""
    path, body = next((path, body) for path in ROUTES for _, found, body in bodies[path] if found == value)
    tracemalloc.start()
    asyncio.run(ask(app, path, filled(body, value)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST_BYTES
