"""Anthropic's own client against a server; prints what its typed models made of the answers, as JSON.

Run with an interpreter that has `anthropic`: `python anthropic_client.py URL MODEL`.
"""

from __future__ import annotations

import json
import sys

import anthropic
from pydantic import TypeAdapter

URL, MODEL = sys.argv[1:]
TEXT = "You know trees, their roots, their stems, and everything that grows on them. " * 6
SYSTEM = [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
TOOL = {
    "name": "plant",
    "description": "Plant trees",
    "input_schema": {
        "type": "object",
        "properties": {"count": {"type": "integer", "maximum": 9}},
        "required": ["count"],
    },
}
ASK = [{"role": "user", "content": [{"type": "text", "text": "Name a tree.", "cache_control": {"type": "ephemeral"}}]}]


def check(model: anthropic.BaseModel) -> None:
    """Validate strictly what the client has only coerced."""
    type(model).model_validate(model.model_dump(mode="json", by_alias=True, exclude_unset=True))


def main() -> dict:
    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    common = {"model": MODEL, "max_tokens": 24, "system": SYSTEM, "extra_body": {"temperature": 0}}
    found: dict = {}

    one = client.messages.create(**common, messages=ASK)
    again = client.messages.create(**common, messages=ASK)
    for message in (one, again):
        check(message)
    found["texts"] = [block.text for block in (*one.content, *again.content)]
    found["usages"] = [message.usage.to_dict() for message in (one, again)]
    found["stops"] = [one.stop_reason, one.stop_sequence]
    found["request_id"] = one._request_id

    counted = client.messages.count_tokens(model=MODEL, system=SYSTEM, messages=ASK)
    check(counted)
    found["counted"] = counted.input_tokens

    events = list(client.messages.create(**common, messages=ASK, stream=True))
    adapter = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    found["events"] = [adapter.validate_python(event.to_dict()).type for event in events]
    with client.messages.stream(**common, messages=ASK) as stream:
        found["streamed"] = "".join(stream.text_stream)
        final = stream.get_final_message()
    check(final)
    found["final"] = [final.content[0].text, final.usage.to_dict()]

    must = {"messages": ASK, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "plant"}, "max_tokens": 80}
    called = client.messages.create(**common | must)
    check(called)
    (call,) = called.content
    found["called"] = [call.type, call.name, call.input, called.stop_reason]
    with client.messages.stream(**common | must) as stream:
        final = stream.get_final_message()
    check(final)
    found["call_streamed"] = final.content[0].input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "They grow."}]}
    turns = [*ASK, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    check(client.messages.create(**common, messages=turns, tools=[TOOL]))

    stopped = client.messages.create(**common, messages=ASK, stop_sequences=[" tree"])
    found["stopped"] = [stopped.stop_reason, stopped.stop_sequence]
    warmed = client.messages.create(**common | {"max_tokens": 0}, messages=ASK)
    check(warmed)
    found["warmed"] = [len(warmed.content), warmed.stop_reason]

    try:
        client.messages.create(**common | {"extra_body": {"temperature": -1}}, messages=ASK)
    except anthropic.BadRequestError as error:
        anthropic.types.ErrorResponse.model_validate(error.body)
        found["refused"] = error.body["error"]["message"]
    try:
        client.messages.create(**common | {"model": "another"}, messages=ASK)
    except anthropic.NotFoundError as error:
        anthropic.types.ErrorResponse.model_validate(error.body)
        found["unknown"] = error.body["error"]["type"]
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
