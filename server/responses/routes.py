"""`/v1/responses`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response

from runtime.errors import InvalidRequest, RametError
from runtime.frontend.output import Submission, new_rid
from runtime.frontend.stream import OutputStream
from runtime.params import EXACT
from server.auth.keys import Asker, EveryKey, Tenant
from server.context import Context, Ctx
from server.explain.inquiry import Inquiry, ask
from server.http import examples
from server.http.answers import write_logprobs
from server.http.errors import NotFound
from server.http.follow import follow, open_outputs
from server.http.sse import Events, TypedEventStream, unless_gone, while_there
from server.openai.chat import Logprobs, find_conversation, reader_of, submission_of
from server.openai.types import ChatRequest, Message
from server.responses.items import chat_of, items_of, turns_of
from server.responses.store import ResponseStore, StoredResponse
from server.responses.types import ResponseRequest
from server.responses.writer import Writer

router = EveryKey(prefix="/v1/responses", tags=["openai"])


@router.post("", response_model=None, responses=examples.RESPONSES)
async def create(body: ResponseRequest, request: Request, context: Ctx, tenant: Asker) -> Response:
    """The model's answer to items, which may go on with a stored response."""
    model = context.check_model(body.model)
    turns, chat, submission = await while_there(request, _read(body, context, tenant))
    conversation, rid = partial(find_conversation, chat, tenant, context), f"resp_{new_rid()}"
    inquiry = ask(context, [submission], chat.explain, chat.earlier, conversation)
    outputs = await open_outputs(request, context, [submission], body.NAMES, body.timeout_s, conversation, rid)
    writer = Writer(body, rid, model, reader_of(chat, context))
    keep = partial(_keep, writer, turns, context.responses, tenant.account) if body.store else None
    events = _events(writer, chat, outputs, context, keep, inquiry)
    if body.stream:
        return TypedEventStream(_or_failed(writer, events), outputs.close)
    return await unless_gone(request, _answer(writer, events, outputs))


@router.post("/input_tokens", response_model=None, responses=examples.INPUT_TOKENS)
async def count_tokens(body: ResponseRequest, request: Request, context: Ctx, tenant: Asker) -> Response:
    """Tokens of the prompt of a request, which is not served."""

    async def work() -> dict[str, Any]:
        _, chat, submission = await _read(body, context, tenant)
        assert callable(submission.prompt)
        prompt = await context.engine.in_turn(tenant.account, chat.num_characters, submission.prompt)
        if not isinstance(prompt, str):
            raise InvalidRequest("a prompt with documents is not counted", param="input")
        (tokens,) = await context.engine.tokenize(tenant.account, [prompt], add_special_tokens=False)
        return {"object": "response.input_tokens", "input_tokens": len(tokens)}

    return await unless_gone(request, work())


@router.get("/{response_id}", responses=examples.RESPONSE)
async def retrieve(response_id: str, context: Ctx, tenant: Asker) -> dict[str, Any]:
    """A stored response of this key."""
    return context.responses.get(tenant.account, response_id).body


@router.get("/{response_id}/input_items", responses=examples.INPUT_ITEMS)
async def input_items(
    response_id: str,
    context: Ctx,
    tenant: Asker,
    limit: Annotated[int, Query(ge=1, le=100, description="most items in the answer")] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="desc: the latest one first")] = "desc",
    after: Annotated[str | None, Query(description="id of the last item of the page before")] = None,
) -> dict[str, Any]:
    """The items before the answer of a stored response, those of the responses that it goes on with included."""
    stored = context.responses.get(tenant.account, response_id)
    items = items_of(stored.turns[: stored.num_asked], stored.id)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise NotFound(f"there is no item {after!r}", param="after")
    first = 0 if after is None else ids.index(after) + 1
    page, ids = items[first : first + limit], ids[first : first + limit]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": page, **ends, "has_more": first + limit < len(items)}


@router.delete("/{response_id}", responses=examples.DELETED)
async def delete(response_id: str, context: Ctx, tenant: Asker) -> dict[str, Any]:
    """Forget a stored response; those that went on with it stay."""
    context.responses.remove(tenant.account, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


async def _read(
    body: ResponseRequest, context: Context, tenant: Tenant
) -> tuple[list[Message], ChatRequest, Submission]:
    """The whole conversation without instructions, and the same as a chat. Raises InvalidRequest and NotFound."""
    context.check_model(body.model)
    store, account = context.responses, tenant.account
    before = store.get(account, body.previous_response_id).turns if body.previous_response_id is not None else []
    answered = store.items(account) if body.has_references else {}

    def work() -> tuple[list[Message], ChatRequest, Submission]:
        turns = [*before, *turns_of(body.input, answered)]
        chat = chat_of(body, turns)
        try:
            chat.refuse_unsupported()
            return turns, chat, replace(submission_of(chat, tenant, context), reuse=EXACT)
        except InvalidRequest as error:
            param = body.NAMES.get(error.param, error.param) if error.param else None
            raise InvalidRequest(error.message, param=param, code=error.code) from None

    return await context.engine.in_turn(account, 0, work)


def _keep(writer: Writer, turns: list[Message], store: ResponseStore, account: str) -> None:
    store.add(account, StoredResponse(writer.response, [*turns, *writer.turns()], len(turns)))


async def _events(
    writer: Writer,
    chat: ChatRequest,
    outputs: OutputStream,
    context: Context,
    keep: Callable[[], None] | None,
    inquiry: Inquiry | None,
) -> Events:
    for event in writer.begin():
        yield event
    async for output in follow(outputs, context):
        logprobs = Logprobs(chat, context.engine.tokenizer)
        await write_logprobs(outputs, logprobs.add, output)
        if inquiry is not None and output.finish is not None:
            writer.explain(await inquiry.explain(outputs, output))
        events = list(writer.add(output, logprobs.content))
        if output.finish is not None and keep is not None:
            keep()  # before the client can ask for it
        for event in events:
            yield event


async def _or_failed(writer: Writer, events: Events) -> Events:
    """The events; a failure is the last one."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except RametError as error:
            yield writer.fail(error.message)


async def _answer(writer: Writer, events: Events, outputs: OutputStream) -> dict[str, Any]:
    with outputs:
        async for _ in events:
            pass
    return writer.response
