"""`/v1/responses`."""

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query, Request, Response

from runtime.frontend.output import new_rid
from server.auth.keys import CurrentTenant, EveryKey, Tenant
from server.generation.bodies import naming
from server.generation.service import Service
from server.http.answers import JsonAnswer, encode
from server.http.context import Context, Ctx
from server.http.sse import Events, TypedEventStream, unless_gone, while_there
from server.openai.chat import message_of
from server.openai.prompt import Chats
from server.openai.types import ChatRequest
from server.responses.items import chat_of, dump, load, read_input, read_output, show
from server.responses.store import Responses, ResponseStore, StoredResponse
from server.responses.types import ResponseRequest
from server.responses.writer import ResponseWriter, replay

router = EveryKey(prefix="/v1/responses", tags=["openai"])


@router.post("", response_model=None)
async def create(
    body: ResponseRequest,
    request: Request,
    service: Service,
    chats: Chats,
    responses: Responses,
    tenant: CurrentTenant,
) -> Response:
    """The model's answer to items, which may continue a stored response."""
    service.context.check_model(body.model)
    with naming(body.NAMES):
        items, chat = await while_there(request, _read(body, service.context, responses, tenant))
        submission = await chats.in_turn(request, chat, tenant)
    submission.progress = body.stream

    def keep(response: dict[str, Any]) -> None:
        answered = frozenset(item["id"] for item in response["output"])
        responses.add(tenant.account, rid, StoredResponse(encode(response), items, answered))

    rid, conversation = f"resp_{new_rid()}", partial(chats.conversation, chat, tenant)
    generation = await service.submit(
        *(request, body, [submission], conversation, rid),
        lambda output: chats.following(chat, tenant, [message_of(chat, service.context.engine.tokenizer, output)]),
    )
    writer = ResponseWriter(body, chat, rid, service.context, keep if body.store else None)
    return await generation.respond(request, writer, body.stream)


@router.post("/input_tokens", response_model=None)
async def count_tokens(
    body: ResponseRequest, request: Request, context: Ctx, chats: Chats, responses: Responses, tenant: CurrentTenant
) -> Response:
    """The number of tokens in a request's prompt. Nothing is generated."""

    context.check_model(body.model)

    async def work() -> dict[str, Any]:
        with naming(body.NAMES):
            _, chat = await _read(body, context, responses, tenant)
            return {"object": "response.input_tokens", "input_tokens": await chats.count(chat, tenant)}

    return await unless_gone(request, work())


@router.get("/{response_id}", response_model=None)
async def retrieve(
    response_id: str,
    responses: Responses,
    tenant: CurrentTenant,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1, description="number of the last event that is known")] = -1,
) -> Response:
    """A stored response of this key; with `stream`, as events, each item in one piece."""
    stored = responses.get(tenant.account, response_id)
    if not stream:
        return JsonAnswer(msgspec.Raw(stored.body))

    async def events() -> Events:
        for event in replay(msgspec.json.decode(stored.body)):
            if event["sequence_number"] > starting_after:
                yield event

    return TypedEventStream(events(), lambda: None)


@router.get("/{response_id}/input_items")
async def input_items(
    response_id: str,
    responses: Responses,
    tenant: CurrentTenant,
    order: Annotated[Literal["asc", "desc"], Query(description="desc: latest first")] = "desc",
) -> dict[str, Any]:
    """All items before a stored response's answer, also those of earlier responses that it continues."""
    items = show(responses.get(tenant.account, response_id).items, response_id)
    if order == "desc":
        items.reverse()
    ends = {"first_id": items[0]["id"] if items else None, "last_id": items[-1]["id"] if items else None}
    return {"object": "list", "data": items, **ends, "has_more": False}


@router.delete("/{response_id}")
async def delete(response_id: str, responses: Responses, tenant: CurrentTenant) -> dict[str, Any]:
    """Delete a stored response. Responses that continue it stay."""
    responses.remove(tenant.account, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


async def _read(
    body: ResponseRequest, context: Context, responses: ResponseStore, tenant: Tenant
) -> tuple[bytes, ChatRequest]:
    """The conversation without instructions, as JSON to store and as a chat. Raises InvalidRequest and NotFound."""
    name, account = body.previous_response_id, tenant.account
    before = None if name is None else responses.get(account, name)
    sources = responses.with_items(account, body.references)

    def work() -> tuple[bytes, ChatRequest]:
        earlier = [] if before is None else [*load(before.items), *read_output(before.output)]
        answered = {item["id"]: item for stored in sources for item in stored.output}
        items = [*earlier, *read_input(body.input, answered)]
        return dump(items) if body.store else b"", chat_of(body, items)

    return await context.engine.in_turn(account, 0, work)
