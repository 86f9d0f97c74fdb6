"""`/v1/conversations`: items by id, which responses continue and extend."""

import time
from typing import Annotated, Any

import msgspec
from fastapi import Request, Response
from pydantic import Field

from runtime.frontend.output import new_rid
from server.auth.keys import CurrentTenant, EveryKey
from server.errors import Conflict, NotFound
from server.generation.store import Responses, ResponseStore, StoredResponse, sizes_of
from server.http.answers import encode
from server.http.context import Ctx
from server.http.sse import unless_gone
from server.http.wire import Body, Named, example
from server.responses.items import After, Limit, Order, dump, page_of, show
from server.responses.types import InputItem, Metadata

router = EveryKey(prefix="/v1/conversations", tags=["openai"])

Items = Annotated[list[InputItem], Field(max_length=20)]
# Most bytes of a conversation, as JSON, that a request may extend.
_MOST_BYTES = 1 << 21


class ConversationRequest(Named):
    """`POST /v1/conversations`, and `/v1/conversations/{id}`, which has no items."""

    model_config = example(items=[{"role": "user", "content": "Name a tree."}])

    items: Items = Field(default_factory=list)
    metadata: Metadata | None = None


class MetadataRequest(Body):
    """`POST /v1/conversations/{id}`."""

    model_config = example(metadata={"topic": "trees"})

    metadata: Metadata


class ItemsRequest(Named):
    """`POST /v1/conversations/{id}/items`."""

    model_config = example(items=[{"role": "user", "content": "Name a tree."}])

    items: Items


def _store(responses: ResponseStore, account: str, conversation: dict[str, Any]) -> None:
    """Store a conversation, whose `output` has its items: so references find them as they find a response's."""
    stored = StoredResponse(encode(conversation), b"[]", sizes_of(conversation["output"]))
    responses.add(account, conversation["id"], stored)


def read_conversation(responses: ResponseStore, account: str, name: str) -> dict[str, Any]:
    """A conversation with its items as `output`. Raises NotFound."""
    found = responses.get(account, name, "conversation")
    conversation: dict[str, Any] = msgspec.json.decode(found.body)
    return conversation


def check_room(responses: ResponseStore, account: str, name: str | None, items: bytes) -> None:
    """Raise Conflict if a conversation (None: a new one) and items, as JSON, are too large, and NotFound."""
    used = 0 if name is None else len(responses.get(account, name, "conversation").body)
    if used + len(items) > _MOST_BYTES:
        raise Conflict(f"a conversation has at most {_MOST_BYTES} bytes; begin a new one", param="conversation")


def extend(responses: ResponseStore, account: str, name: str, items: list[dict[str, Any]]) -> None:
    """Add items to a conversation. Raises NotFound, and Conflict where others have filled it meanwhile."""
    check_room(responses, account, name, encode(items))
    conversation = read_conversation(responses, account, name)
    conversation["output"] += items
    _store(responses, account, conversation)


def _place(items: list[dict[str, Any]], item_id: str) -> int:
    for i, item in enumerate(items):
        if item["id"] == item_id:
            return i
    raise NotFound(f"the conversation has no item {item_id!r}", param="item_id")


def _shown(conversation: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in conversation.items() if key != "output"}


@router.post("", response_model=None)
async def create(
    body: ConversationRequest, request: Request, context: Ctx, responses: Responses, tenant: CurrentTenant
) -> Response:
    """A new conversation."""

    async def work() -> dict[str, Any]:
        items = await context.engine.in_turn(tenant.account, 0, lambda: dump(body.items))
        check_room(responses, tenant.account, None, items)
        conversation = {
            **{"id": f"conv_{new_rid()}", "object": "conversation", "created_at": int(time.time())},
            **{"metadata": body.metadata or {}, "output": show(items, new_rid())},
        }
        _store(responses, tenant.account, conversation)
        return _shown(conversation) | ({"left_out": body.left_out} if body.left_out else {})

    return await unless_gone(request, work())


@router.get("/{conversation_id}")
async def retrieve(conversation_id: str, responses: Responses, tenant: CurrentTenant) -> dict[str, Any]:
    """A conversation without its items."""
    return _shown(read_conversation(responses, tenant.account, conversation_id))


@router.post("/{conversation_id}")
async def update(
    conversation_id: str, body: MetadataRequest, responses: Responses, tenant: CurrentTenant
) -> dict[str, Any]:
    """Replace a conversation's metadata."""
    conversation = read_conversation(responses, tenant.account, conversation_id) | {"metadata": body.metadata}
    _store(responses, tenant.account, conversation)
    return _shown(conversation)


@router.delete("/{conversation_id}")
async def delete(conversation_id: str, responses: Responses, tenant: CurrentTenant) -> dict[str, Any]:
    """Delete a conversation. Responses within it stay."""
    responses.remove(tenant.account, conversation_id, "conversation")
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.get("/{conversation_id}/items")
async def items(
    conversation_id: str,
    responses: Responses,
    tenant: CurrentTenant,
    order: Order = "desc",
    after: After = None,
    limit: Limit = 20,
) -> dict[str, Any]:
    """Items of a conversation."""
    found = read_conversation(responses, tenant.account, conversation_id)["output"]
    return page_of(found, order, after, limit)


@router.post("/{conversation_id}/items", response_model=None)
async def add_items(
    conversation_id: str,
    body: ItemsRequest,
    request: Request,
    context: Ctx,
    responses: Responses,
    tenant: CurrentTenant,
) -> Response:
    """Add items to a conversation."""

    async def work() -> dict[str, Any]:
        items = await context.engine.in_turn(tenant.account, 0, lambda: dump(body.items))
        check_room(responses, tenant.account, conversation_id, items)
        new = show(items, new_rid())
        extend(responses, tenant.account, conversation_id, new)
        return page_of(new, "asc", None, len(new)) | ({"left_out": body.left_out} if body.left_out else {})

    return await unless_gone(request, work())


@router.get("/{conversation_id}/items/{item_id}")
async def item(conversation_id: str, item_id: str, responses: Responses, tenant: CurrentTenant) -> dict[str, Any]:
    """An item of a conversation."""
    found = read_conversation(responses, tenant.account, conversation_id)["output"]
    return dict(found[_place(found, item_id)])


@router.delete("/{conversation_id}/items/{item_id}")
async def delete_item(
    conversation_id: str, item_id: str, responses: Responses, tenant: CurrentTenant
) -> dict[str, Any]:
    """Delete an item of a conversation; returns the conversation."""
    conversation = read_conversation(responses, tenant.account, conversation_id)
    del conversation["output"][_place(conversation["output"], item_id)]
    _store(responses, tenant.account, conversation)
    return _shown(conversation)
