"""KV of stored objects, computed before a prompt reads it, and pinned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import Request
from pydantic import Field

from runtime.frontend.output import PlacedPrompt, Submission
from runtime.params import SamplingParams
from server.auth.keys import CacheScope, Forbidden, Tenant
from server.context import Context
from server.http.follow import collect, open_outputs
from server.http.sse import while_there
from server.http.wire import Body, CacheSalt
from server.store import Conflict, S, Store, Stored


class Ahead(Body):
    """Fields of requests for objects whose KV can be computed now."""

    encode: bool = Field(False, description="compute the KV now; else at its first use")
    pin: bool = Field(False, description="admin keys: keep this KV in the cache; 409 over the budget of pins")
    ttl_s: float | None = Field(None, gt=0, le=1e9, description="seconds until the object expires; null: never")
    cache_salt: CacheSalt | None = None
    cache_scope: CacheScope = "private"


async def keep(
    store: Store[S],
    new: S,
    prompt: Callable[[], PlacedPrompt],
    body: Ahead,
    request: Request,
    context: Context,
    tenant: Tenant,
) -> S:
    """Store an object, compute its KV and pin it, as the request asks; the stored object. Its pins live as long.

    Args:
        prompt: makes a prompt that only encodes.

    Raises:
        Conflict: over the bounds of the store, or if the computation is aborted; then a new object is forgotten.
        Forbidden: if the key may not pin, or not use the scope.
    """
    if body.pin and not tenant.admin:
        raise Forbidden("this key may not pin", param="pin")
    namespace = tenant.namespace(body.cache_salt, body.cache_scope)
    stored, is_new = store.put(tenant.account, new, body.ttl_s)
    ahead = Submission(
        prompt=prompt,
        num_characters=new.num_tokens * 4,
        sampling=SamplingParams(max_new_tokens=0),
        account=tenant.account,
        namespace=namespace,
    )
    pin = body.pin or bool(stored.lease.pins)
    try:
        if body.encode or pin:
            await _encode(ahead, request, context)
        if pin:
            await _pin(ahead, stored, store, body.ttl_s, request, context)
    except BaseException:
        if is_new and not stored.lease.pins:  # another request may have pinned it
            store.drop(tenant.account, stored)
        raise
    return stored


async def _encode(ahead: Submission, request: Request, context: Context) -> None:
    outputs = await open_outputs(request, context, [ahead], {"prompt": "encode"}, None)
    (done,) = await while_there(request, collect(outputs, context))
    if done.finish is not None and done.finish.type == "abort":
        raise Conflict("the computation was aborted", param="encode", code="aborted")


async def _pin(
    ahead: Submission, stored: S, store: Store[S], ttl_s: float | None, request: Request, context: Context
) -> None:
    pins = await while_there(request, context.engine.pin_entries(ahead, stored.id, ttl_s))
    before, stored.lease.pins = stored.lease.pins, pins
    await _unpin(before, context)
    if not store.holds(ahead.account, stored):
        await unpin(stored, context)
        message = f"the {store.noun} was deleted meanwhile"
        raise Conflict(message, param=store.source, code=f"{store.noun}_deleted")


async def unpin(stored: Stored, context: Context) -> None:
    """Remove an object's pins, if they are still there."""
    await _unpin(stored.lease.pins, context)


async def _unpin(pins: Sequence[str], context: Context) -> None:
    for pin in pins:
        await context.engine.unpin(pin)


async def live_pins(several: Sequence[Stored], context: Context) -> set[str]:
    """Ids of all pins, if an object has some: pins expire, yield to requests, and end with the engine."""
    if not any(stored.lease.pins for stored in several):
        return set()
    return {pin["id"] for pin in (await context.engine.pins())["pins"]}
