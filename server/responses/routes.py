"""`/v1/responses`."""

from functools import partial
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec
from fastapi import Query, Request, Response

from runtime.errors import InvalidRequest
from runtime.frontend.output import new_rid
from server.auth.keys import CurrentTenant, EveryKey, Tenant
from server.errors import BodyTooLarge, NotImplementedHere
from server.generation.bodies import naming
from server.generation.service import Service
from server.generation.store import Responses, ResponseStore, StoredResponse, sizes_of
from server.http.answers import JsonAnswer, encode
from server.http.context import Context, Ctx
from server.http.limits import MOST_BYTES, check_body
from server.http.sse import Events, TypedEventStream, unless_gone, while_there
from server.openai.chat import message_of
from server.openai.prompt import Chats
from server.openai.types import ChatRequest
from server.responses.items import After, Limit, Order, chat_of, dump, load, page_of, read_input, read_output, show
from server.responses.types import ResponseRequest
from server.responses.writer import ResponseWriter, events_of

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
    deadline = body.deadline(service.context)
    with naming(body.NAMES):
        asked = await while_there(request, deadline.keep(_read(body, service.context, responses, tenant)))
        submission = await chats.make_submission(request, asked.chat, tenant, deadline)
    submission = msgspec.structs.replace(submission, progress=body.stream)

    def keep(response: dict[str, Any]) -> None:
        if body.store:
            stored = StoredResponse(encode(response), asked.items, sizes_of(response["output"]))
            responses.add(tenant.account, rid, stored)

    rid, chat = f"resp_{new_rid()}", asked.chat
    conversation = partial(chats.conversation, chat, tenant)
    generation = await service.submit(
        request,
        body,
        [submission],
        conversation,
        rid,
        lambda encoded, output: chats.following(
            chat, tenant, [message_of(chat, service.context.engine.tokenizer, encoded, output)]
        ),
    )
    writer = ResponseWriter(body, chat, generation.outputs.submissions[0], rid, service.context, keep)
    return await generation.respond(request, writer, body.stream)


@router.post("/input_tokens", response_model=None)
async def count_tokens(
    body: ResponseRequest, request: Request, context: Ctx, chats: Chats, responses: Responses, tenant: CurrentTenant
) -> Response:
    """The number of tokens in a request's prompt. Nothing is generated."""

    context.check_model(body.model)

    async def work() -> dict[str, Any]:
        with naming(body.NAMES):
            asked = await _read(body, context, responses, tenant)
            return {"object": "response.input_tokens", "input_tokens": len(await chats.tokens(asked.chat, tenant))}

    return await unless_gone(request, work())


@router.post("/compact", response_model=None, include_in_schema=False)
async def compact() -> NoReturn:
    """Always 501."""
    raise NotImplementedHere(
        "conversations are not compacted: what replaces the earlier items is encrypted for OpenAI's own models; let "
        "the client ask the model for a summary, and begin a new conversation with it"
    )


@router.post("/{response_id}/cancel", response_model=None, include_in_schema=False)
async def cancel(response_id: str, responses: Responses, tenant: CurrentTenant) -> NoReturn:
    """Always refused: no response is in the background."""
    responses.get(tenant.account, response_id)
    raise InvalidRequest("only a response in the background can be cancelled, and this one has ended")


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
        for event in events_of(msgspec.json.decode(stored.body)):
            if event["sequence_number"] > starting_after:
                yield event

    return TypedEventStream(events(), lambda: None)


@router.get("/{response_id}/input_items")
async def input_items(
    response_id: str,
    responses: Responses,
    tenant: CurrentTenant,
    order: Order = "desc",
    after: After = None,
    limit: Limit = 20,
) -> dict[str, Any]:
    """Items before a stored response's answer, also those of earlier responses that it continues."""
    return page_of(show(responses.get(tenant.account, response_id).items, response_id), order, after, limit)


@router.delete("/{response_id}")
async def delete(response_id: str, responses: Responses, tenant: CurrentTenant) -> dict[str, Any]:
    """Delete a stored response. Responses that continue it stay."""
    responses.remove(tenant.account, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


class _Asked(NamedTuple):
    """A request.

    Attributes:
        items: the conversation without instructions, as JSON to store.
        chat: the conversation as a chat.
    """

    items: bytes
    chat: ChatRequest


async def _read(body: ResponseRequest, context: Context, responses: ResponseStore, tenant: Tenant) -> _Asked:
    """Raises InvalidRequest, NotFound, and BodyTooLarge where stored items exceed the limits on a body."""
    name, account = body.previous_response_id, tenant.account
    before = None if name is None else responses.get(account, name)
    sources = responses.with_items(account, {*body.references})
    sizes = {name: size for stored in sources for name, size in stored.answered.items()}
    size = sum(sizes.get(reference, 0) for reference in body.references)
    size += 0 if before is None else len(before.items) + sum(before.answered.values())
    if size > MOST_BYTES:
        raise BodyTooLarge(f"the stored items of this request have {size} bytes; the limit is {MOST_BYTES}")

    def work() -> _Asked:
        earlier = [] if before is None else [*load(before.items), *read_output(before.output)]
        answered = {item["id"]: item for stored in sources for item in stored.output}
        new = read_input(body.input, answered)
        kept = dump([*earlier, *new])
        check_body(kept)
        return _Asked(kept if body.store else b"", chat_of(body, [*earlier, *new]))

    return await context.engine.in_turn(account, size, work)
