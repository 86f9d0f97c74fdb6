"""Routes to inspect the prefix cache, and to pin and evict its nodes."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi import Path as PathParameter
from msgspec.structs import asdict, replace
from pydantic import Field, model_validator

from radix import Eviction, Outlook
from radix.views import Block, NodeView
from runtime import calls
from runtime.errors import InvalidRequest
from runtime.frontend.output import Prompt, Submission
from runtime.params import SamplingParams
from server.admin.node_ids import ids_for
from server.auth.keys import CurrentTenant, EveryKey, Tenant
from server.errors import Forbidden, NotFound
from server.features.parts import FeatureStores, Stores, find_parts
from server.features.registry import write_turns
from server.generation.bodies import Scoped
from server.http.answers import JsonObject
from server.http.body import Body, Text, TokenIds, example
from server.http.context import Context, Ctx, erase
from server.http.sse import while_there
from server.openai.messages import Messages

router = APIRouter(prefix="/cache", tags=["cache"])
# Routes for every key, which sees only its own part of the cache.
own = EveryKey(prefix="/cache", tags=["cache"])

A = TypeVar("A")


class PinRequest(Body, Scoped):
    """A prefix to pin: exactly one of `text`, `input_ids` and `messages`, which the chat template renders."""

    model_config = example(text="You are a helpful assistant. ...", name="system", ttl_s=3600)

    text: Text | None = Field(None, min_length=1)
    input_ids: TokenIds | None = Field(None, min_length=1)
    messages: Messages | None = None
    tenant: str | None = Field(
        None, description="name of the API key whose namespace holds the prefix; default: the request's own key"
    )
    name: Text | None = Field(None, max_length=256)
    ttl_s: float | None = Field(None, gt=0, le=1e9, description="seconds until the pin expires; null: never")

    @model_validator(mode="after")
    def _has_one_form(self) -> PinRequest:
        if sum(form is not None for form in (self.text, self.input_ids, self.messages)) != 1:
            raise ValueError("exactly one of text, input_ids and messages must be given")
        return self

    def prefix(self, tenant: Tenant, context: Context, stores: Stores) -> Submission:
        """Raises NotFound and InvalidRequest."""
        if self.tenant is not None:
            tenant = context.tenant(self.tenant)
        sampling, messages = SamplingParams(max_new_tokens=1, temperature=0), self.messages
        if context.engine.sight is not None and any(message.images for message in messages or ()):
            raise InvalidRequest("images are not served in a pin: pin the node of a request", param="messages")
        if messages is None:
            prompt = self.text if self.text is not None else self.input_ids or []
            return self.submission(prompt, sampling, tenant, context)

        def render() -> Prompt:
            turns = find_parts([message.plain() for message in messages], tenant.account, stores)
            template = context.engine.tokenizer.apply_chat_template
            return write_turns(turns, partial(template, add_generation_prompt=False))

        return self.submission(render, sampling, tenant, context, add_special_tokens=False)


@router.post("/pin")
async def pin(
    context: Ctx, stores: FeatureStores, body: PinRequest, request: Request, tenant: CurrentTenant
) -> JsonObject:
    """Pin the whole pages of a prefix. A prefix that is not cached is computed first. 409 over the budget."""
    prefix = body.prefix(tenant, context, stores)
    pinned = await while_there(request, context.engine.pin(prefix, body.name, body.ttl_s))
    return asdict(context.named(pinned))


@router.get("/pins")
async def pins(context: Ctx) -> JsonObject:
    """All pins, the kept prefixes summed by tenant, the tokens that both hold, and the budget."""
    return msgspec.to_builtins(await pins_of(context))


async def pins_of(context: Context) -> calls.AllPins:
    """The answer of `/cache/pins`."""
    found = await context.engine.call(calls.GetPins())
    pins, kept = [context.named(pin) for pin in found.pins], [context.named(one) for one in found.kept]
    return replace(found, pins=pins, kept=kept)


@router.delete("/pins/{pin_id}")
async def unpin(context: Ctx, pin_id: str) -> JsonObject:
    """Remove a pin; its pages stay cached until they are evicted."""
    if not await context.engine.call(calls.RemovePin(pin_id)):
        raise NotFound(f"there is no pin {pin_id!r}", param="pin_id", code="pin_not_found")
    return {"success": True}


Page = Annotated[int, PathParameter(ge=0, lt=1 << 31, description="the node's first page, its `id` in `/cache/tree`")]
Start = Annotated[
    int, Query(ge=0, lt=1 << 31, description="number of tokens before the node; 404 if it does not match")
]


@router.post("/nodes/{page}/pin")
async def pin_node(context: Ctx, page: Page, start: Start) -> JsonObject:
    """Pin the prefix that ends with a node. 404 if the node is gone, 409 over the budget."""
    return asdict(context.named(await _on_node(context, calls.PinNode(page, start))))


@router.delete("/nodes/{page}/pin")
async def unpin_node(context: Ctx, page: Page, start: Start) -> JsonObject:
    """Remove every pin that holds a node."""
    return {"unpinned": await _on_node(context, calls.UnpinNode(page, start))}


@router.delete("/nodes/{page}")
async def drop_node(context: Ctx, page: Page, start: Start) -> JsonObject:
    """Evict a node and its subtree, except nodes that live requests or pins hold."""
    return {"evicted_tokens": await _on_node(context, calls.DropNode(page, start))}


@router.get("/nodes/{page}")
async def read_node(
    context: Ctx,
    page: Page,
    start: Start,
    from_: Annotated[
        int | None, Query(alias="from", ge=0, lt=1 << 31, description="first token to show; default: start")
    ] = None,
) -> JsonObject:
    """The text of a node; `from` adds the text of the nodes above it, from that token on."""
    tokens = preview_tokens(await _on_node(context, calls.ReadNode(page, start)), start if from_ is None else from_)
    text = await asyncio.to_thread(context.engine.tokenizer.decode, tokens, skip_special_tokens=False)
    return {"tokens": len(tokens), "text": text}


async def _on_node(context: Context, call: calls.OnNode[A | None]) -> A:
    if (done := await context.engine.call(call)) is None:
        raise NotFound(f"there is no such node at page {call.page}", param="page", code="node_not_found")
    return done


@router.get("/tiers")
async def tiers(context: Ctx) -> JsonObject:
    """The tiers below the pool, in the order in which blocks are looked up."""
    state = await context.engine.call(calls.GetState())
    tiers = {name: asdict(tier) for name, tier in state.tiers.items()}
    return {"tiers": tiers, "loaded_tokens_by_tier": state.labelled.get("loaded_tokens_by_tier", {})}


@router.delete("/tenants/{name}")
async def erase_tenant(context: Ctx, name: str, request: Request) -> JsonObject:
    """Erase all that is kept of a tenant, except live requests: pages, pins and blocks of all tiers, stored objects and
    responses, the journal and the recorded trace.

    `erased_blocks` is null for a failed tier, which is erased before its next use.
    """
    account = context.tenant(name).account
    erase(request.app, account)
    return asdict(await context.engine.erase(account))


@router.get("/stats")
async def stats(context: Ctx) -> JsonObject:
    """The engine's counters, histograms and gauges."""
    return (await context.engine.call(calls.GetState())).flat()


@own.get("/quota")
async def quota(
    context: Ctx,
    asker: CurrentTenant,
    tenant: Annotated[str | None, Query(description="admin keys: name of the API key whose quota to show")] = None,
) -> JsonObject:
    """The key's quota and its used part, in pages and in tokens; null without a quota."""
    return await quota_of(context.visible(asker, tenant) or asker, context)


async def quota_of(tenant: Tenant, context: Context) -> JsonObject:
    """The answer of `/cache/quota`."""
    found = asdict(await context.engine.call(calls.GetQuota(tenant.account)))
    size = context.engine.info.page_size
    tokens = {name.replace("pages", "tokens"): None if n is None else n * size for name, n in found.items()}
    return {"tenant": tenant.name, **found, **tokens}


@own.get("/tree")
async def tree(
    context: Ctx,
    asker: CurrentTenant,
    tenant: Annotated[str | None, Query(description="admin keys: name of the API key whose nodes to show")] = None,
    depth: Annotated[int | None, Query(ge=1, le=10_000, description="deepest level; default: all")] = None,
    cursor: Annotated[int, Query(ge=0, le=10_000_000, description="`next_cursor` of the previous answer")] = 0,
    limit: Annotated[int, Query(ge=1, le=4096, description="most nodes in the response")] = 256,
    preview: Annotated[int, Query(ge=0, le=256, description="admin keys: tokens of each node to show as text")] = 0,
) -> JsonObject:
    """The radix tree's nodes, level by level, parents first. Keys without `admin` see only their own nodes."""
    if preview and not asker.admin:
        raise Forbidden("this key may not see the text of nodes", param="preview")
    whose = context.visible(asker, tenant)
    account = None if whose is None else whose.account
    found = await context.engine.call(calls.GetTree(account, depth, cursor, limit, preview))
    id_of = ids_for(asker)
    shown = [_show(node, found.tiers, context, id_of) for node in found.nodes]
    return {"nodes": shown, "next_cursor": cursor + limit if len(shown) == limit else None}


def _show(
    node: NodeView, tiers: Mapping[int, list[str]] | None, context: Context, id_of: Callable[[int], int]
) -> JsonObject:
    """A node with its tenant's name instead of its namespace (a digest and a salt)."""
    shown: JsonObject = fields_of(node) | {"id": id_of(node.id), "tenant": context.tenant_name(node.namespace.tenant)}
    shown["parent"] = None if node.parent is None else id_of(node.parent)
    del shown["namespace"], shown["preview"]
    if tiers is not None:
        shown["tiers"] = tiers[node.id]
    if tokens := preview_tokens(node.preview):
        shown["preview"] = context.engine.tokenizer.decode(tokens, skip_special_tokens=False)
    return shown


def fields_of(one: NodeView | Block | Eviction) -> JsonObject:
    """The fields by name; an outlook's, too. `dataclasses.asdict` copies all that they hold, in ten times the time."""
    found: JsonObject = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    if isinstance(outlook := found.get("outlook"), Outlook):
        found["outlook"] = dataclasses.asdict(outlook)
    return found


def preview_tokens(run: bytes, first: int = 0) -> list[int]:
    """The tokens of a run, from number `first` on, without the -1 that pad a page."""
    return [token for token in array("i", run)[first:] if token >= 0]
