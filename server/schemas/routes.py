"""`/v1/schemas`: schemas of prompt modules."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import Field

from runtime.errors import InvalidRequest
from runtime.reuse.modules.markup import MAX_CHARACTERS
from runtime.reuse.modules.schema import Mode
from server.ahead import Ahead, keep, live_pins, unpin
from server.auth.keys import Asker, CacheScope, EveryKey
from server.context import Context, Ctx
from server.http import examples
from server.http.answers import JsonAnswer
from server.http.sse import while_there
from server.http.wire import CacheSalt, Text, example
from server.schemas.store import StoredSchema, make

router = EveryKey(prefix="/v1/schemas", tags=["schemas"])

Paths = Annotated[list[Text], Field(max_length=1024)]


class SchemaRequest(Ahead):
    """A schema in PML. `encode` and `pin` compute the KV of all modules now, for requests with the same salt."""

    model_config = example(
        pml='<schema name="cities">You plan trips.<module name="miami">Miami is a city ...</module></schema>'
    )

    pml: Annotated[Text, Field(max_length=MAX_CHARACTERS)]
    mode: Mode = "independent"
    scaffolds: Annotated[list[Paths], Field(max_length=64)] | None = Field(
        None, description="mode scaffold: sets of paths that are encoded together; default: all outside of unions"
    )


@router.post("", response_model=None, responses=examples.SCHEMA)
async def add_schema(body: SchemaRequest, request: Request, context: Ctx, tenant: Asker) -> Response:
    """Register a schema; the same one again renews its time to live. 409 if another schema has the name."""
    engine = context.engine
    if engine.info.diffusion is not None:
        raise InvalidRequest("a diffusion model takes no modules", param="pml")
    read = partial(make, body.pml, body.mode, body.scaffolds, engine.tokenizer, engine.info.context_length)
    made = await while_there(request, engine.in_turn(tenant.account, len(body.pml), read))
    stored = await keep(context.schemas, made, made.schema.everything, body, request, context, tenant)
    return await _show(stored, context)


@router.get("", responses=examples.SCHEMAS)
async def list_schemas(context: Ctx, tenant: Asker) -> dict[str, Any]:
    """The key's own schemas, oldest first, without their modules."""
    schemas = context.schemas.of(tenant.account)
    now_s, live = context.schemas.clock(), await live_pins(schemas, context)
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
    await unpin(context.schemas.remove(tenant.account, name), context)
    return {"success": True}


async def _show(stored: StoredSchema, context: Context, **more: Any) -> Response:
    live = await live_pins([stored], context)
    return JsonAnswer({**stored.describe(context.schemas.clock(), live), "modules": stored.modules, **more})
