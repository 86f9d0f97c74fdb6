"""Routes for health, the model and the version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

from runtime.errors import EngineDead, Overloaded
from runtime.frontend.output import Submission
from runtime.params import SamplingParams
from server.auth.keys import Asker, EveryKey
from server.context import Ctx
from server.http import examples
from server.http.follow import collect
from server.http.sse import unless_gone

router = EveryKey(tags=["server"])

# Timeout of `/health_generate`, seconds.
_PROBE_S = 60.0
_PROBE_PRIORITY = 1 << 30


@router.get("/health", response_class=PlainTextResponse, responses=examples.OK)
async def health(context: Ctx) -> Response:
    """200 while the engine process runs, else 503."""
    if not context.engine.alive:
        raise EngineDead("the engine is not running")
    return PlainTextResponse("ok")


@router.get("/ready", response_class=PlainTextResponse, responses=examples.OK)
async def ready(context: Ctx) -> Response:
    """200 while new requests are served; 503 without an engine, while it is paused or hangs, and during a stop."""
    if not context.engine.alive:
        raise EngineDead("the engine is not running")
    context.gate.check()
    if context.engine.paused:
        raise Overloaded("the engine is paused")
    if context.engine.late:
        raise Overloaded("the engine has not finished a step in time")
    return PlainTextResponse("ok")


@router.get("/health_generate", response_model=None, responses=examples.PROBED)
async def health_generate(request: Request, context: Ctx, asker: Asker) -> Response:
    """200 once a token has been generated, at the highest priority that the key may ask for."""
    sampling = SamplingParams(max_new_tokens=1, temperature=0)
    priority = _PROBE_PRIORITY if asker.admin else asker.max_priority
    probe = Submission(
        [0], sampling, account=asker.account, namespace=asker.namespace(None, "private"), priority=priority
    )

    async def work() -> dict[str, Any]:
        await collect(await context.engine.open([probe], _PROBE_S), context)
        return {"status": "ok"}

    return await unless_gone(request, work())


@router.get("/model_info", responses=examples.MODEL_INFO)
@router.get("/get_model_info", include_in_schema=False)
async def model_info(context: Ctx, asker: Asker) -> dict[str, Any]:
    """The loaded model; its directory only for admin keys."""
    info = context.engine.info
    path = info.path if asker.admin else info.name
    return {
        "model_path": path,
        "tokenizer_path": path,
        "served_model_name": info.name,
        "architecture": info.architecture,
        "is_generation": True,
        "context_length": info.context_length,
        "vocab_size": info.vocab_size,
        "eos_token_ids": info.eos_token_ids,
        "dtype": info.dtype,
        "diffusion": msgspec.to_builtins(info.diffusion),
    }


@router.get("/version", responses=examples.VERSION)
async def show_version() -> dict[str, str]:
    """The version of Ramet."""
    return {"version": version("ramet")}
