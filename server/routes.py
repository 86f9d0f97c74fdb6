"""Routes about the server, the model and the cache."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from runtime.errors import EngineDead, InvalidRequest
from runtime.output import Submission
from runtime.sampling_params import SamplingParams
from server.context import Ctx, Rid
from server.follow import collect
from server.sse import unless_gone

router = APIRouter(tags=["server"])


class AbortRequest(BaseModel):
    """Which request to end."""

    model_config = ConfigDict(extra="forbid")

    rid: Rid | None = None
    abort_all: bool = False


class TokenizeRequest(BaseModel):
    """Text to tokenize."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | list[str]
    add_special_tokens: bool = True


class DetokenizeRequest(BaseModel):
    """Token ids to make text of."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]] | list[list[Annotated[int, Field(ge=0)]]]
    skip_special_tokens: bool = True


@router.get("/health", response_model=None)
async def health(context: Ctx) -> Response:
    """200 while the engine process runs, else 503."""
    if not context.engine.alive:
        raise EngineDead("the engine is not running")
    return PlainTextResponse("ok")


@router.get("/health_generate", response_model=None)
async def health_generate(request: Request, context: Ctx) -> Response:
    """200 once a token has been generated."""
    probe = Submission([0], SamplingParams(max_new_tokens=1, temperature=0), priority=1 << 30)

    async def work() -> dict[str, Any]:
        await collect(await context.engine.open([probe]), context.metrics)
        return {"status": "ok"}

    return await unless_gone(request, work())


@router.get("/model_info")
@router.get("/get_model_info", include_in_schema=False)
async def model_info(context: Ctx) -> dict[str, Any]:
    """The loaded model."""
    info = context.engine.info
    return {
        "model_path": info.path,
        "served_model_name": info.name,
        "architecture": info.architecture,
        "is_generation": True,
        "context_length": info.context_length,
        "vocab_size": info.vocab_size,
        "eos_token_ids": info.eos_token_ids,
        "dtype": info.dtype,
    }


@router.get("/server_info")
@router.get("/get_server_info", include_in_schema=False)
async def server_info(context: Ctx) -> dict[str, Any]:
    """Version, configuration, model, and the engine's counters and gauges."""
    return {
        "version": version("ramet"),
        "model": msgspec.to_builtins(context.engine.info),
        "config": context.config.model_dump(mode="json"),
        "state": await context.engine.state(),
    }


@router.api_route("/flush_cache", methods=["GET", "POST"])
async def flush_cache(context: Ctx, pins: bool = False) -> dict[str, Any]:
    """Drop every cached page that no live request uses; pinned ones only with `?pins=true`."""
    return {"success": True, **await context.engine.flush_cache(pins)}


@router.post("/abort_request")
async def abort_request(context: Ctx, body: AbortRequest) -> dict[str, Any]:
    """End a request by its id, or all; each ends with finish reason `abort`. Unknown ids are no error."""
    if (body.rid is None) == (not body.abort_all):
        raise InvalidRequest("either rid or abort_all must be given", param="rid")
    context.engine.abort(body.rid)
    return {"success": True}


@router.post("/tokenize")
async def tokenize(context: Ctx, body: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a text, or of several."""
    encode = context.engine.tokenizer.encode
    limit = context.engine.info.context_length
    if isinstance(body.prompt, str):
        tokens = encode(body.prompt, body.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": limit}
    several = [encode(prompt, body.add_special_tokens) for prompt in body.prompt]
    return {"tokens": several, "count": [len(tokens) for tokens in several], "max_model_len": limit}


@router.post("/detokenize")
async def detokenize(context: Ctx, body: DetokenizeRequest) -> dict[str, Any]:
    """Text of token ids, or of several lists of them."""
    tokens, vocab = body.tokens, context.engine.info.vocab_size
    several: list[list[int]] = tokens if tokens and isinstance(tokens[0], list) else [tokens]  # type: ignore[list-item]
    for ids in several:
        if bad := next((token for token in ids if token >= vocab), None):
            raise InvalidRequest(f"token id {bad} is out of range: the model has {vocab} tokens", param="tokens")
    texts = [context.engine.tokenizer.decode(ids, body.skip_special_tokens) for ids in several]
    return {"text": texts if several is tokens else texts[0]}


@router.get("/metrics", response_model=None)
async def metrics(context: Ctx) -> Response:
    """Prometheus exposition text."""
    text = context.metrics.render(await context.engine.state())
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
