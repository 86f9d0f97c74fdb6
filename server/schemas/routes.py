"""`/v1/schemas`: schemas of prompt modules."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field

from radix import Namespace
from runtime.errors import InvalidRequest
from runtime.frontend.output import Submission
from runtime.params import SamplingParams
from runtime.reuse.modules.markup import MAX_CHARACTERS
from runtime.reuse.modules.schema import Mode
from server.auth.keys import Asker, CacheScope, Forbidden, Tenant
from server.context import Context, Ctx
from server.http import examples
from server.http.answers import JsonAnswer
from server.http.follow import collect, open_outputs
from server.http.sse import while_there
from server.http.wire import Body, CacheSalt, Text
from server.schemas.store import SchemaConflict, Stored, make

router = APIRouter(prefix="/v1/schemas", tags=["schemas"])

Paths = Annotated[list[Text], Field(max_length=1024)]


class SchemaRequest(Body):
    """A schema in PML. `encode` and `pin` compute the KV of all modules now, for requests with the same salt."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "pml": '<schema name="cities">You plan trips.<module name="miami">Miami is a city ...</module></schema>'
            }
        }
    )

    pml: Annotated[Text, Field(max_length=MAX_CHARACTERS)]
    mode: Mode = "independent"
    scaffolds: Annotated[list[Paths], Field(max_length=64)] | None = Field(
        None, description="mode scaffold: sets of paths that are encoded together; default: all outside of unions"
    )
    encode: bool = Field(False, description="compute the KV of all modules now; else each at its first use")
    pin: bool = Field(False, description="admin keys: keep this KV in the cache; 409 over the budget of pins")
    ttl_s: float | None = Field(None, gt=0, le=1e9, description="seconds until the schema expires; null: never")
    cache_salt: CacheSalt | None = None
    cache_scope: CacheScope = "private"


@router.post("", response_model=None, responses=examples.SCHEMA)
async def add_schema(body: SchemaRequest, request: Request, context: Ctx, tenant: Asker) -> Response:
    """Register a schema; the same one again renews its time to live. 409 if another schema has the name."""
    if body.pin and not tenant.admin:
        raise Forbidden("this key may not pin", param="pin")
    namespace = tenant.namespace(body.cache_salt, body.cache_scope)
    engine = context.engine
    if engine.info.diffusion is not None:
        raise InvalidRequest("a diffusion model takes no modules", param="pml")
    read = partial(make, body.pml, body.mode, body.scaffolds, engine.tokenizer, engine.info.context_length)
    made = await while_there(request, engine.in_turn(tenant.account, len(body.pml), read))
    stored, is_new = context.schemas.put(tenant.account, made, body.ttl_s)
    try:
        if body.encode or body.pin:
            await _encode(stored, body, namespace, request, context, tenant)
    except BaseException:
        if is_new:
            context.schemas.drop(tenant.account, stored)
        raise
    return await _show(stored, context)


async def _encode(
    stored: Stored, body: SchemaRequest, namespace: Namespace, request: Request, context: Context, tenant: Tenant
) -> None:
    """Compute the KV of all modules, and pin it if that is asked for."""
    ahead = Submission(
        prompt=stored.schema.everything,
        num_characters=stored.num_tokens * 4,
        sampling=SamplingParams(max_new_tokens=0),
        account=tenant.account,
        namespace=namespace,
    )
    outputs = await open_outputs(request, context, [ahead], {"prompt": "encode"}, None)
    (done,) = await while_there(request, collect(outputs, context.metrics))
    if done.finish is not None and done.finish.type == "abort":
        raise SchemaConflict("the computation was aborted", param="encode", code="aborted")
    if body.pin:
        pins = await while_there(request, context.engine.pin_modules(ahead, stored.schema.name, body.ttl_s))
        await _unpin(stored, context)
        stored.pins = pins
        if not context.schemas.holds(tenant.account, stored):
            await _unpin(stored, context)
            raise SchemaConflict("the schema was deleted meanwhile", param="pml", code="schema_deleted")


@router.get("", responses=examples.SCHEMAS)
async def list_schemas(context: Ctx, tenant: Asker) -> dict[str, Any]:
    """The key's own schemas, oldest first, without their modules."""
    schemas = context.schemas.of(tenant.account)
    now_s, live = context.schemas.clock(), await _live_pins(schemas, context)
    return {"object": "list", "data": [stored.describe(now_s, live) for stored in schemas]}


@router.get("/{name}", response_model=None, responses=examples.CACHED_SCHEMA)
async def get_schema(
    name: str,
    request: Request,
    context: Ctx,
    tenant: Asker,
    cache_salt: CacheSalt | None = None,
    cache_scope: CacheScope = "private",
) -> Response:
    """A schema, its layout, and how much of each module is cached now for prompts with this salt and scope."""
    stored = context.schemas.get(tenant.account, name)
    namespace, engine = tenant.namespace(cache_salt, cache_scope), context.engine
    every = await while_there(request, engine.in_turn(tenant.account, 4 * stored.num_tokens, stored.schema.everything))
    cached = await while_there(request, engine.cached(every, namespace))
    names = [entry["name"] for entry in every.reuse["entries"]]
    by_path = {path: cached[entry] for entry in names for path in entry.split(", ")}
    return await _show(stored, context, cached_tokens=by_path)


@router.delete("/{name}", responses=examples.SUCCESS)
async def delete_schema(name: str, context: Ctx, tenant: Asker) -> dict[str, Any]:
    """Forget a schema and remove its pins; its KV stays cached until it is evicted."""
    await _unpin(context.schemas.remove(tenant.account, name), context)
    return {"success": True}


async def _unpin(stored: Stored, context: Context) -> None:
    """Remove a schema's pins, if they are still there."""
    for pin in stored.pins:
        await context.engine.unpin(pin)


async def _live_pins(schemas: list[Stored], context: Context) -> set[str]:
    """Ids of all pins, if a schema has some: pins expire, yield to requests, and end with the engine."""
    if not any(stored.pins for stored in schemas):
        return set()
    return {pin["id"] for pin in (await context.engine.pins())["pins"]}


async def _show(stored: Stored, context: Context, **more: Any) -> Response:
    live = await _live_pins([stored], context)
    return JsonAnswer({**stored.describe(context.schemas.clock(), live), "modules": stored.modules, **more})
