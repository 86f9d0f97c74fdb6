"""Adds examples of answers and the API keys to the OpenAPI document."""

import json
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from server.auth.keys import OPEN_PATHS

_EXAMPLES = Path(__file__).with_name("examples.json")
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


def describe(app: FastAPI, has_keys: bool) -> None:
    """Add examples of answers. With keys, also declare that all routes except `OPEN_PATHS` need one."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = make()
            _add_examples(document["paths"])
            if has_keys:
                _add_keys(document)
        return make()

    app.openapi = openapi  # type: ignore[method-assign]


def _add_examples(paths: dict[str, Any]) -> None:
    """Add an example of each route's answer and, if the route streams, of an event."""
    examples = json.loads(_EXAMPLES.read_text(encoding="utf-8"))
    for name, answer in examples["answers"].items():
        kind = "text/plain" if isinstance(answer, str) else "application/json"
        _success(paths, name)["content"][kind]["example"] = answer
    for name, event in examples["events"].items():
        success = _success(paths, name)
        success["description"] = "the answer, or its events if `stream` is true"
        stream = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        success["content"]["text/event-stream"] = {"schema": {"type": "string"}, "example": stream}


def _success(paths: dict[str, Any], name: str) -> dict[str, Any]:
    """The 2xx response of the route with the name `METHOD PATH`."""
    method, path = name.split()
    responses = paths[path][method.lower()]["responses"]
    return next(found for status, found in responses.items() if status.startswith("2"))


def _add_keys(document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = _SCHEMES
    document["security"] = [{name: []} for name in _SCHEMES]
    for path in OPEN_PATHS & document["paths"].keys():
        for operation in document["paths"][path].values():
            operation["security"] = []
