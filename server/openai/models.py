"""`/v1/models`, and `/v1/embeddings`, which Ramet does not implement."""

import time
from typing import Any, NoReturn

from runtime.models.resolve import served_names
from server.auth.keys import CurrentTenant, EveryKey, Tenant
from server.errors import NotImplementedHere
from server.http.context import Context, Ctx

router = EveryKey(prefix="/v1", tags=["openai"])

_STARTED_S = int(time.time())


@router.get("/models")
async def models(context: Ctx, asker: CurrentTenant) -> dict[str, Any]:
    """The served model under each of its names, and the adapters."""
    names = served_names(context.config.model) or [context.engine.info.name]
    names += [adapter.name for adapter in context.engine.adapters]
    return {"object": "list", "data": [_model(name, context, asker) for name in names]}


@router.get("/models/{name:path}")
async def model(name: str, context: Ctx, asker: CurrentTenant) -> dict[str, Any]:
    """The served model or an adapter by its name."""
    return _model(name, context, asker)


def _model(name: str, context: Context, asker: Tenant) -> dict[str, Any]:
    info, adapter = context.engine.info, context.adapter(name)
    own, path = (info.name, info.path) if adapter is None else (adapter.name, adapter.path)
    return {
        **{"id": name, "object": "model", "created": _STARTED_S, "owned_by": "ramet"},
        **{"root": path if asker.admin else own, "parent": None if adapter is None else info.name},
        "max_model_len": info.context_length,
    }


@router.post("/embeddings", response_model=None, include_in_schema=False)
async def embeddings() -> NoReturn:
    """Always 501: embeddings are not supported."""
    raise NotImplementedHere("embeddings are not supported")
