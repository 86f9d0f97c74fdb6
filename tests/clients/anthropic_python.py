"""The official `anthropic` client: messages, whole and streamed, a call and the count of tokens."""

import sys

from anthropic import Anthropic

url, model = sys.argv[1:]
api = Anthropic(base_url=url, api_key="none", max_retries=0)
ask = {
    "model": model,
    "messages": [{"role": "user", "content": "Name a tree."}],
    "max_tokens": 16,
    "extra_body": {"temperature": 0},
}
whole = api.messages.create(**ask, system="Be brief.")
with api.messages.stream(**ask, system="Be brief.") as stream:
    assert stream.get_final_message().content[0].text == whole.content[0].text
schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
tool = {"name": "weather", "description": "The weather of a city.", "input_schema": schema}
called = api.messages.create(**{**ask, "max_tokens": 60}, tools=[tool], tool_choice={"type": "any"})
assert called.content[-1].input["city"] in ("Rome", "Paris")
assert api.messages.count_tokens(model=model, messages=ask["messages"]).input_tokens > 0
print("messages, streams, calls, counts")
