"""The routes of one kind of stored objects: add, list, show, delete."""

# FastAPI evaluates the annotations below, which are local names, so they must not be postponed.

from functools import partial
from typing import Annotated, Any

from fastapi import Body, Path, Query, Request, Response

from runtime.frontend.async_engine import AsyncEngine
from server.auth.keys import CurrentTenant, EveryKey, Tenant
from server.features.chunks.precompute import Precompute, add_object, live_pins, unpin
from server.features.chunks.store import Store, StoredObject
from server.generation.bodies import Scoped
from server.generation.service import Service
from server.http.answers import JsonAnswer, JsonList
from server.http.context import Ctx, provided
from server.http.sse import while_there


def object_router(kind: type[Store[Any]], body_type: type[Precompute], query_type: type[Scoped]) -> EveryKey:
    """Make the router of a store.

    Args:
        kind: the class of the store.
        body_type: the body of a request that adds an object.
        query_type: the query whose salt and scope choose the cached tokens to count.
    """
    noun = kind.noun
    router = EveryKey(prefix=f"/v1/{noun}s", tags=[f"{noun}s"])
    AllObjects = Annotated[Store[Any], provided(kind)]
    Given = Annotated[body_type, Body()]  # type: ignore[valid-type]
    Name = Annotated[str, Path(alias=f"{noun}_id")]
    KvQuery = Annotated[query_type, Query()]  # type: ignore[valid-type]

    about = f"Store a {noun}. Storing it again renews its time to live. 409 if a different {noun} has the id."

    @router.post("", name=f"add_{noun}", description=about, response_model=None)
    async def add(
        body: Given, request: Request, store: AllObjects, service: Service, tenant: CurrentTenant
    ) -> Response:
        stored = await add_object(body, store, request, service, tenant)
        return await _show(stored, body, store, request, service.context.engine, tenant)

    about = f"The key's own {noun}s, oldest first."

    @router.get("", name=f"list_{noun}s", description=about, response_model=None)
    async def list_all(store: AllObjects, context: Ctx, tenant: CurrentTenant) -> Response:
        several = store.of(tenant.account)
        shown, now_s, live = JsonList(), store.clock(), await live_pins(several, context.engine)
        for stored in several:
            shown.append(stored.describe(now_s, live))
        return JsonAnswer({"object": "list", "data": shown})

    about = f"A {noun}, and how many of its tokens are cached now for prompts with this salt and scope."

    @router.get(f"/{{{noun}_id}}", name=f"get_{noun}", description=about, response_model=None)
    async def get(
        name: Name, kv: KvQuery, request: Request, store: AllObjects, context: Ctx, tenant: CurrentTenant
    ) -> Response:
        return await _show(store.get(tenant.account, name), kv, store, request, context.engine, tenant)

    about = f"Delete a {noun} and its pins. Its KV stays cached until it is evicted."

    @router.delete(f"/{{{noun}_id}}", name=f"delete_{noun}", description=about)
    async def delete(name: Name, store: AllObjects, context: Ctx, tenant: CurrentTenant) -> dict[str, Any]:
        await unpin(store.remove(tenant.account, name).pins, context.engine)
        return {"success": True}

    return router


async def _show(
    stored: StoredObject, kv: Scoped, store: Store[Any], request: Request, engine: AsyncEngine, tenant: Tenant
) -> Response:
    namespace, live = tenant.namespace(kv.cache_salt, kv.cache_scope), await live_pins([stored], engine)
    make = engine.in_turn(tenant.account, 4 * stored.num_tokens, partial(stored.encoding, kv))
    prompt = await while_there(request, make)
    cached = await while_there(request, engine.cached(prompt, namespace))
    return JsonAnswer({**stored.describe(store.clock(), live), **stored.details(prompt, cached)})
