"""API keys in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from server.auth.keys import OPEN_PATHS

_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


def describe_keys(app: FastAPI) -> None:
    """Add the security schemes: every route needs a key, except `OPEN_PATHS`."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = make()
            document["components"]["securitySchemes"] = _SCHEMES
            document["security"] = [{name: []} for name in _SCHEMES]
            for path in OPEN_PATHS & document["paths"].keys():
                for operation in document["paths"][path].values():
                    operation["security"] = []
        return make()

    app.openapi = openapi  # type: ignore[method-assign]
