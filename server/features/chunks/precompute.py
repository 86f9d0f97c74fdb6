"""Computes and pins the KV of stored objects before a prompt reads it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from pydantic import Field

from runtime.calls import GetPins, RemovePin
from runtime.errors import InvalidRequest
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.output import Encoded, Submission
from runtime.models.tokenizer import Tokenizer
from runtime.params import SamplingParams
from server.auth.keys import Tenant
from server.errors import Conflict, Forbidden
from server.features.chunks.store import Store, StoredObject
from server.generation.bodies import Scoped
from server.generation.service import GenerationService
from server.http.body import Body
from server.http.sse import while_there


class Precompute(Body, Scoped, ABC):
    """Base of requests that store an object."""

    encode: bool = Field(False, description="compute the KV now; otherwise at its first use")
    pin: bool = Field(False, description="admin keys: keep the KV in the cache; 409 if it exceeds --pin-budget")
    ttl_s: float | None = Field(None, gt=0, le=1e9, description="seconds until the object expires; null: never")

    @abstractmethod
    def read(self, tokenizer: Tokenizer, context_length: int) -> StoredObject:
        """Make the object, without storing it. Raises InvalidRequest."""


async def add_object(
    body: Precompute, store: Store[Any], request: Request, service: GenerationService, tenant: Tenant
) -> StoredObject:
    """Store an object and, if the request asks, compute and pin its KV. Pins expire with the object.

    Raises:
        InvalidRequest: if the object cannot be served.
        Conflict: over the bounds of the store, or if the computation is aborted, which removes a new object.
        Forbidden: if the key may not pin, or may not use the scope.
    """
    engine = service.context.engine
    if engine.info.decoding is not None:
        raise InvalidRequest(f"{engine.info.name} reuses no {store.noun}s", param=store.source)
    if body.pin and not tenant.admin:
        raise Forbidden("this key may not pin", param="pin")
    tenant.namespace(body.cache_salt, body.cache_scope)  # raises Forbidden before the object is stored
    read = partial(body.read, engine.tokenizer, engine.info.context_length)
    new = await while_there(request, engine.in_turn(tenant.account, len(getattr(body, store.source)), read))
    stored, is_new = store.put(tenant.account, new, body.ttl_s)
    stored.is_for(body, engine.config.cache.reuse)
    make, characters = partial(stored.encoding, body), stored.num_tokens * 4
    encoding = body.submission(
        make, SamplingParams(max_new_tokens=0), tenant, service.context, num_characters=characters
    )
    pin = body.pin or bool(stored.pins)
    try:
        pin = pin and stored.is_reused(body)
        if pin or (body.encode and stored.is_reused(body)):
            encoded = await _encode(encoding, request, service)
        if pin:
            await _pin(encoded, stored, store, body.ttl_s, request, engine)
    except BaseException:
        if is_new and not stored.pins:  # another request may have pinned it
            store.drop(tenant.account, stored)
        raise
    return stored


async def _encode(encoding: Submission, request: Request, service: GenerationService) -> Encoded:
    timeout_s = service.context.config.scheduler.max_timeout
    encoded, done = await service.run(request, encoding, {"prompt": "encode"}, timeout_s)
    if done.finish is not None and done.finish.type == "abort":
        raise Conflict("the computation was aborted", param="encode", code="aborted")
    return encoded


async def _pin(
    encoded: Encoded,
    stored: StoredObject,
    store: Store[Any],
    ttl_s: float | None,
    request: Request,
    engine: AsyncEngine,
) -> None:
    pins = await while_there(request, engine.pin_entries(encoded, stored.id, ttl_s))
    before, stored.pins = stored.pins, pins
    await unpin(before, engine)
    if not store.holds(encoded.account, stored):
        await unpin(pins, engine)
        message = f"the {store.noun} was deleted during this request"
        raise Conflict(message, param=store.source, code=f"{store.noun}_deleted")


async def unpin(pins: Iterable[str], engine: AsyncEngine) -> None:
    """Remove those pins that still exist."""
    for pin in pins:
        await engine.call(RemovePin(pin))


async def live_pins(several: Sequence[StoredObject], engine: AsyncEngine) -> set[str]:
    """The ids of all existing pins, because an object's pins may have ended; empty if no object ever had pins."""
    if not any(stored.pins for stored in several):
        return set()
    return {pin.id for pin in (await engine.call(GetPins())).pins}
