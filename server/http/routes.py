"""Routes for health, the model and its tokenizer."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import ConfigDict

from runtime.errors import EngineDead, Overloaded
from runtime.frontend.output import Submission
from runtime.params import SamplingParams
from server.auth.keys import Asker
from server.context import Ctx
from server.http import examples
from server.http.follow import collect
from server.http.sse import unless_gone
from server.http.wire import Body, IdPrompts, OneOrMany, Text

router = APIRouter(tags=["server"])

# Timeout of `/health_generate`, seconds.
_PROBE_S = 60.0
_PROBE_PRIORITY = 1 << 30


class TokenizeRequest(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "The capital of France is"}})

    model: str | None = None
    prompt: OneOrMany[Text]
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"tokens": [504, 3575, 282, 4649, 314]}})

    model: str | None = None
    tokens: IdPrompts
    skip_special_tokens: bool = True


@router.head("/health", include_in_schema=False)
@router.get("/health", response_class=PlainTextResponse, responses=examples.OK)
async def health(context: Ctx) -> Response:
    """200 while the engine process runs, else 503."""
    if not context.engine.alive:
        raise EngineDead("the engine is not running")
    return PlainTextResponse("ok")


@router.head("/ready", include_in_schema=False)
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
        await collect(await context.engine.open([probe], _PROBE_S), context.metrics)
        return {"status": "ok"}

    return await unless_gone(request, work())


@router.get("/model_info", responses=examples.MODEL_INFO)
@router.get("/get_model_info", include_in_schema=False)
async def model_info(context: Ctx, asker: Asker) -> dict[str, Any]:
    """The loaded model; its directory only for admin keys."""
    info = context.engine.info
    return {
        "model_path": info.path if asker.admin else info.name,
        "served_model_name": info.name,
        "architecture": info.architecture,
        "is_generation": True,
        "context_length": info.context_length,
        "vocab_size": info.vocab_size,
        "eos_token_ids": info.eos_token_ids,
        "dtype": info.dtype,
        "diffusion": msgspec.to_builtins(info.diffusion),
    }


@router.post("/tokenize", response_model=None, responses=examples.TOKENS)
async def tokenize(request: Request, context: Ctx, body: TokenizeRequest, asker: Asker) -> Response:
    """Token ids of one text or several."""
    single = isinstance(body.prompt, str)
    texts: list[str] = [body.prompt] if single else body.prompt  # type: ignore[list-item, assignment]

    async def work() -> dict[str, Any]:
        tokens = await context.engine.tokenize(asker.account, texts, body.add_special_tokens)
        counts = [len(ids) for ids in tokens]
        return {
            "tokens": tokens[0] if single else tokens,
            "count": counts[0] if single else counts,
            "max_model_len": context.engine.info.context_length,
        }

    return await unless_gone(request, work())


@router.post("/detokenize", response_model=None, responses=examples.TEXT)
async def detokenize(request: Request, context: Ctx, body: DetokenizeRequest, asker: Asker) -> Response:
    """Text of one list of token ids or several."""
    single = not body.tokens or isinstance(body.tokens[0], int)
    several: list[list[int]] = [body.tokens] if single else body.tokens  # type: ignore[list-item, assignment]

    async def work() -> dict[str, Any]:
        texts = await context.engine.detokenize(asker.account, several, body.skip_special_tokens)
        return {"text": texts[0] if single else texts}

    return await unless_gone(request, work())
