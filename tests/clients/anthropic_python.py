"""The official `anthropic` client, whose typed models read every answer: messages, streams, calls, caches, errors."""

import re
import sys
from pathlib import Path

import anthropic
from anthropic.types import ErrorResponse, RawMessageStreamEvent
from pydantic import TypeAdapter

url, model = sys.argv[1:]
api = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
EVENTS: TypeAdapter = TypeAdapter(RawMessageStreamEvent)
TEXT = "You know trees, their roots, their stems, and everything that grows on them. " * 6
SYSTEM = [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
ASK = [{"role": "user", "content": [{"type": "text", "text": "Name a tree.", "cache_control": {"type": "ephemeral"}}]}]
COMMON = {"model": model, "max_tokens": 24, "system": SYSTEM, "extra_body": {"temperature": 0}}


def typed(answer: anthropic.BaseModel):
    """The answer, validated strictly: the client itself takes whatever it gets."""
    return type(answer).model_validate(answer.model_dump(mode="json", by_alias=True, exclude_unset=True))


def streamed(**asked) -> anthropic.types.Message:
    for event in api.messages.create(**asked, stream=True):
        EVENTS.validate_python(event.to_dict())
    with api.messages.stream(**asked) as stream:
        return typed(stream.get_final_message())


one, again = (typed(api.messages.create(**COMMON, messages=ASK)) for _ in range(2))
assert one.content[0].text == again.content[0].text == streamed(**COMMON, messages=ASK).content[0].text
created = one.usage.cache_creation
assert created.ephemeral_1h_input_tokens > 0
assert created.ephemeral_5m_input_tokens > 0
counted = typed(api.messages.count_tokens(model=model, system=SYSTEM, messages=ASK)).input_tokens
for usage in (one.usage, again.usage):
    assert usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens == counted
assert again.usage.cache_read_input_tokens == counted - 1

schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
tool = {"name": "weather", "description": "The weather of a city.", "input_schema": schema}
must = {"messages": ASK, "tools": [tool], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 80}
called = typed(api.messages.create(**COMMON | must))
(call,) = called.content
assert (call.type, call.name, called.stop_reason) == ("tool_use", "weather", "tool_use")
assert call.input["city"] in ("Rome", "Paris")
assert streamed(**COMMON | must).content[0].input == call.input
result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "It rains."}]}
turns = [*ASK, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
assert typed(api.messages.create(**COMMON, messages=turns, tools=[tool])).content

warmed = typed(api.messages.create(**COMMON | {"max_tokens": 0}, messages=ASK))
assert (warmed.content, warmed.stop_reason) == ([], "max_tokens")
refused = ""
try:
    api.messages.create(**COMMON | {"extra_body": {"temperature": -1}}, messages=ASK)
except anthropic.BadRequestError as error:
    refused = ErrorResponse.model_validate(error.body).error.message
assert "temperature" in refused

readme = (Path(__file__).parents[2] / "server/anthropic/README.md").read_text("utf-8")
space: dict = {}
for example in re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
    exec(example.replace("http://127.0.0.1:30000", url).replace("smollm2-135m-instruct", model), space)
assert space["turns"][1]["content"][-1].name == "weather"
print("messages, streams, calls, counts, breakpoints, errors, the README's examples")
