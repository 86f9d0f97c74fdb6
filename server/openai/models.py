"""`/v1/models`, and `/v1/embeddings`, which Ramet does not implement."""

import time
from datetime import UTC, datetime
from typing import Any, NoReturn

from fastapi import Request

from runtime.models.resolve import served_names
from server.auth.keys import EveryKey
from server.errors import NotImplementedHere
from server.http.context import Context, Ctx

router = EveryKey(tags=["openai"])

_STARTED_S = int(time.time())


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(request: Request, context: Ctx) -> dict[str, Any]:
    """The served model under each of its names, and the adapters; in Anthropic's form for Anthropic's clients."""
    names = served_names(context.config.model) or [context.engine.info.name]
    names += [adapter.name for adapter in context.engine.adapters]
    found = [_model(name, context) for name in names]
    if "anthropic-version" not in request.headers:
        return {"object": "list", "data": found}
    ends = {"first_id": names[0], "last_id": names[-1]}
    return {"data": [_of_anthropic(model) for model in found], "has_more": False, **ends}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request, context: Ctx) -> dict[str, Any]:
    """The served model or an adapter by its name."""
    found = _model(name, context)
    return _of_anthropic(found) if "anthropic-version" in request.headers else found


def _of_anthropic(model: dict[str, Any]) -> dict[str, Any]:
    created = datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": created}


def _model(name: str, context: Context) -> dict[str, Any]:
    info, adapter = context.engine.info, context.adapter(name)
    return {
        "id": name,
        "object": "model",
        "created": _STARTED_S,
        "owned_by": "ramet",
        "root": info.name if adapter is None else adapter.name,
        "parent": None if adapter is None else info.name,
        "max_model_len": info.context_length,
    }


@router.post("/v1/embeddings", response_model=None, include_in_schema=False)
async def embeddings() -> NoReturn:
    """Always 501: embeddings are not supported."""
    raise NotImplementedHere("embeddings are not supported")
