"""Routes to control and monitor the server."""

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from runtime.calls import FlushCache, GetState, Pause, State
from runtime.errors import InvalidRequest
from server.http.answers import JsonObject
from server.http.body import Body, Rid, example
from server.http.context import Ctx, provided
from server.telemetry.metrics import Metrics

router = APIRouter(tags=["server"])

Measured = Annotated[Metrics, provided(Metrics)]


class AbortRequest(Body):
    model_config = example(rid="my-request")

    rid: Rid | None = None
    abort_all: bool = False


@router.post("/pause")
async def pause(context: Ctx) -> JsonObject:
    """Stop computing until `/resume`: running requests stand still, new ones wait."""
    return {"paused": await context.engine.call(Pause(True))}


@router.post("/resume")
async def resume(context: Ctx) -> JsonObject:
    """Continue after `/pause`."""
    return {"paused": await context.engine.call(Pause(False))}


@router.post("/shutdown", status_code=202)
async def shutdown(context: Ctx) -> JsonObject:
    """Shut down as on SIGTERM: new requests are refused, running requests get `--drain-time` to end."""
    context.shutdown.set()
    return {"success": True}


@router.get("/server_info")
@router.get("/get_server_info", include_in_schema=False)
async def server_info(context: Ctx) -> JsonObject:
    """Version, configuration, model, and the engine's counters and gauges; SGLang's fields for routers."""
    info, options = context.engine.info, context.config
    return {
        "model_path": info.path,
        "tokenizer_path": info.path,
        "served_model_name": info.name,
        "tp_size": options.model.tensor_parallel,
        "dp_size": 1,
        "disaggregation_mode": "null",
        "context_length": info.context_length,
        "page_size": info.page_size,
        "max_total_num_tokens": info.pool_tokens,
        "max_running_requests": info.max_running,
        "version": version("ramet"),
        "model_info": msgspec.to_builtins(info),
        "config": context.config.model_dump(mode="json"),
        "state": (await context.engine.call(GetState())).flat(),
    }


@router.get("/v1/loads")
async def loads(context: Ctx, metrics: Measured) -> JsonObject:
    """The load of the server, in SGLang's form for routers."""
    state = await context.engine.call(GetState())
    used, page_size = _used_pages(state), context.engine.info.page_size
    running, waiting, speed = state["running"], state["waiting"], metrics.now()["tokens_per_s"]
    shares = {"token_usage": used / state["pages_total"], "utilization": running / context.engine.info.max_running}
    hit_rate = state["cached_tokens"] / (state["queried_tokens"] or 1)
    load = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "gen_throughput": speed,
        "num_used_tokens": used * page_size,
        "max_total_num_tokens": context.engine.info.pool_tokens,
        **shares,
        "cache_hit_rate": hit_rate,
        "max_running_requests": context.engine.info.max_running,
    }
    total = {"total_running_reqs": running, "total_waiting_reqs": waiting, "total_reqs": running + waiting}
    mean = {"avg_token_usage": shares["token_usage"], "avg_throughput": speed, "avg_utilization": shares["utilization"]}
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": version("ramet"),
        "dp_rank_count": 1,
        "loads": [load],
        "aggregate": total | mean,
    }


@router.get("/get_load", include_in_schema=False)
async def get_load(context: Ctx) -> list[JsonObject]:
    """The load of the server, in the form of older SGLang."""
    state = await context.engine.call(GetState())
    counts = {"num_reqs": state["running"] + state["waiting"], "num_waiting_reqs": state["waiting"]}
    return [{"dp_rank": 0, **counts, "num_tokens": _used_pages(state) * context.engine.info.page_size}]


def _used_pages(state: State) -> int | float:
    """Pages of live requests."""
    return state["pages_private"] + state["pages_locked"]


@router.post("/flush_cache")
async def flush_cache(context: Ctx, pins: bool = False, tiers: bool = False) -> JsonObject:
    """Drop all cached pages that no live request uses. `?pins=true` also drops pinned pages, `?tiers=true` tiers."""
    return {"success": True, **msgspec.to_builtins(await context.engine.call(FlushCache(pins, tiers)))}


@router.post("/abort_request")
async def abort_request(context: Ctx, body: AbortRequest) -> JsonObject:
    """Abort one request by its id, or all requests. `success` is false for an unknown id, which is no error."""
    if (body.rid is None) == (not body.abort_all):
        raise InvalidRequest("either rid or abort_all must be given", param="rid")
    aborted = context.engine.abort(body.rid)
    return {"success": body.abort_all or aborted > 0, "aborted": aborted}


@router.get("/metrics", response_class=PlainTextResponse)
async def show_metrics(context: Ctx, metrics: Measured, request: Request) -> Response:
    """Prometheus exposition text."""
    state = await context.engine.call(GetState())
    connections = len(getattr(request.state, "connections", ()))
    text = metrics.render(state, connections, {each.name: each.digest for each in context.engine.adapters})
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
