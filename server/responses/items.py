"""Converts the items of a request to a chat."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query
from pydantic import ConfigDict, TypeAdapter

from runtime.errors import InvalidRequest
from server.errors import NotFound
from server.generation.bodies import naming
from server.http.body import Unusable
from server.openai.messages import Message
from server.openai.tools import Function, Tool
from server.openai.types import ChatRequest
from server.responses import types

_HIDDEN = ConfigDict(hide_input_in_errors=True)
_item: TypeAdapter[types.Item] = TypeAdapter(types.Item, config=_HIDDEN)
_items: TypeAdapter[list[types.Item]] = TypeAdapter(list[types.Item], config=_HIDDEN)
# Parameters of routes that list items.
Order = Annotated[Literal["asc", "desc"], Query(description="desc: latest first")]
After = Annotated[str | None, Query(max_length=256, description="id of the item before the first one")]
Limit = Annotated[int, Query(ge=1, le=100, description="most items")]
# Fields of a ChatRequest that are not copied from the request, because it lacks them or has another form.
_OWN = frozenset(
    {"messages", "tools", "tool_choice", "response_format", "max_tokens", "stream_options", "reasoning_effort"}
)


def dump(items: Sequence[types.Item]) -> bytes:
    """The items as JSON, which `load` reads."""
    return _items.dump_json([*items], by_alias=True, exclude_none=True)


load = _items.validate_json
read_output = _items.validate_python


def read_input(given: str | list[types.Item], answered: Mapping[str, dict[str, Any]]) -> list[types.Item]:
    """The items of a request, with references replaced by items of `answered`. Raises NotFound for unknown ones."""
    if isinstance(given, str):
        return [types.ItemMessage(role="user", content=given)]
    found: dict[str, types.Item] = {}

    def read(item: types.Item) -> types.Item:
        if not isinstance(item, types.ItemReference):
            return item
        if item.id not in answered:
            raise NotFound(f"there is no item {item.id!r} in a stored response", param="input")
        if item.id not in found:
            found[item.id] = _item.validate_python(answered[item.id])
        return found[item.id]

    return [*map(read, given)]


def page_of(items: list[dict[str, Any]], order: str, after: str | None, limit: int) -> dict[str, Any]:
    """A page of items. Raises NotFound for an unknown `after`."""
    ordered = items[::-1] if order == "desc" else items
    start = 0
    if after is not None:
        start = next((i for i, item in enumerate(ordered, 1) if item["id"] == after), 0)
        if not start:
            raise NotFound(f"there is no item {after!r}", param="after")
    shown = ordered[start : start + limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": len(ordered) > start + limit}


def show(items: bytes, name: str) -> list[dict[str, Any]]:
    """Items from `dump`'s JSON, as clients get them; their ids end with `name`."""
    shown = []
    for i, plain in enumerate(msgspec.json.decode(items)):
        if isinstance(plain.get("content"), str):
            kind = "output_text" if plain["role"] == "assistant" else "input_text"
            plain["content"] = [{"type": kind, "text": plain["content"]}]
        shown.append({"id": f"item_{i}_{name}", "status": "completed", **plain})
    return shown


def turns_of(items: list[types.Item]) -> list[Message]:
    """The items as messages of a chat. Reasoning joins the assistant's next message, calls the one before."""
    turns: list[Message] = []
    thoughts: list[str] = []
    for item in items:
        if isinstance(item, types.ItemReasoning):
            thoughts += [part.text for part in item.content]
            continue
        if isinstance(item, Unusable):
            continue
        turn = _turn(item, turns[-1] if turns else None)
        if thoughts and turn.role == "assistant":
            turn.reasoning_content = "\n".join(filter(None, [turn.reasoning_content, *thoughts]))
            thoughts = []
        if not turns or turn is not turns[-1]:
            turns.append(turn)
    return turns


def _turn(item: types.Item, last: Message | None) -> Message:
    """The message of an item. A call is added to the assistant's message `last`, if there is one."""
    if isinstance(item, types.ItemMessage):
        return item.model_copy()  # reasoning and calls may be added to the copy
    if isinstance(item, types.ItemResult):
        return Message(role="tool", tool_call_id=item.call_id, content=item.output)  # type: ignore[arg-type]
    assert isinstance(item, types.ItemCall)
    if last is None or last.role != "assistant":
        return Message(role="assistant", tool_calls=[item.plain()])
    last.tool_calls = (last.tool_calls or []) + [item.plain()]
    return last


def chat_of(body: types.ResponseRequest, items: list[types.Item]) -> ChatRequest:
    """The request as a chat; `items`: the whole conversation without instructions. Raises InvalidRequest."""
    turns = turns_of(items)
    if body.instructions is not None:
        turns = [Message(role="system", content=body.instructions), *turns]
    if not turns:
        raise InvalidRequest("input is empty", param="input")
    same = (ChatRequest.model_fields.keys() & types.ResponseRequest.model_fields.keys() & body.model_fields_set) - _OWN
    form = body.text.format or types.TextFormat()
    fields = {
        **{name: getattr(body, name) for name in same},
        "messages": turns,
        "max_tokens": body.max_output_tokens,
        "tools": [_tool(name, description, tool.parameters) for name, tool, description, _ in body.offered] or None,
        "tool_choice": _choice(body.tool_choice) if body.offered or body.tool_choice not in ("auto", "none") else None,
        "response_format": {"type": form.type, "schema": form.schema_},
        "reasoning_effort": body.reasoning.effort,
        "reuse": {"method": "none"},  # responses have no field that reports approximate reuse
        "logprobs": body.with_logprobs,
        "top_logprobs": (body.top_logprobs or 0) if body.with_logprobs else None,
    }
    with naming(body.NAMES):  # for example, earlier and new messages together may be too many
        chat = ChatRequest.model_validate(fields)
        chat.refuse_unsupported()
        return chat


def _tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Tool:
    return Tool(type="function", function=Function(name=name, description=description, parameters=parameters))


def _choice(choice: types.ItemChoice) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, types.ItemAllowed):
        tools = [_named(tool.name) for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return _named(choice.name)


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
