"""Routes for health, the model and the version."""

from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

from runtime.errors import EngineDead, Overloaded
from runtime.params import SamplingParams
from server.auth.keys import CurrentTenant, EveryKey
from server.generation.bodies import Scoped
from server.generation.service import Service
from server.http.context import Ctx

router = EveryKey(tags=["server"])

# Timeout of `/health_generate`, seconds.
_PROBE_S = 60.0
_PROBE_PRIORITY = 1 << 30


@router.get("/health", response_class=PlainTextResponse)
@router.get("/ping", response_class=PlainTextResponse, include_in_schema=False)
@router.get("/v1/health", response_class=PlainTextResponse, include_in_schema=False)
async def health(context: Ctx) -> Response:
    """200 while the engine process runs, else 503."""
    if not context.engine.alive:
        raise EngineDead("the engine is not running")
    return PlainTextResponse("ok")


@router.get("/ready", response_class=PlainTextResponse)
async def ready(context: Ctx) -> Response:
    """200 while new requests are served; 503 if the engine is dead, paused or hanging, or the server is stopping."""
    if not context.engine.alive:
        raise EngineDead("the engine is not running")
    context.shutdown.check()
    if context.engine.paused:
        raise Overloaded("the engine is paused")
    if context.engine.late:
        raise Overloaded("the engine has not finished a step in time")
    return PlainTextResponse("ok")


@router.get("/health_generate")
async def health_generate(request: Request, service: Service, asker: CurrentTenant) -> dict[str, str]:
    """Generate one token at the key's highest priority, then answer 200."""
    priority = _PROBE_PRIORITY if asker.admin else asker.max_priority
    sampling = SamplingParams(max_new_tokens=1, temperature=0)
    probe = Scoped().submission([0], sampling, asker, service.context, priority=priority)
    await service.run(request, probe, timeout_s=_PROBE_S)
    return {"status": "ok"}


@router.get("/model_info")
@router.get("/get_model_info", include_in_schema=False)
async def model_info(context: Ctx, asker: CurrentTenant) -> dict[str, Any]:
    """The loaded model. Only admin keys see its directory."""
    info = context.engine.info
    path = info.path if asker.admin else info.name
    return {
        "model_path": path,
        "tokenizer_path": path,
        "served_model_name": info.name,
        "architecture": info.architecture,
        "is_generation": True,
        "has_image_understanding": context.engine.sight is not None,
        "context_length": info.context_length,
        "vocab_size": info.vocab_size,
        "eos_token_ids": info.eos_token_ids,
        "dtype": info.dtype,
        "diffusion": msgspec.to_builtins(info.decoding),
    }


@router.get("/props", include_in_schema=False)
async def props(context: Ctx, asker: CurrentTenant) -> dict[str, Any]:
    """The model as llama.cpp describes it."""
    engine = context.engine
    return {
        "default_generation_settings": {"n_ctx": engine.info.context_length},
        "total_slots": engine.info.max_running,
        "model_alias": engine.info.name,
        "model_path": engine.info.path if asker.admin else engine.info.name,
        "chat_template": engine.tokenizer.chat_template or "",
        "modalities": {"vision": context.engine.sight is not None, "audio": False},
        "build_info": f"ramet {version('ramet')}",
    }


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of Ramet."""
    return {"version": version("ramet")}
