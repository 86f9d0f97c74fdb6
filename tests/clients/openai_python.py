"""The official `openai` client: models, completions, chats and responses, whole and streamed, typed and with tools."""

import json
import sys

from openai import OpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
api = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


class Tree(BaseModel):
    name: str = Field(max_length=16)
    height: int = Field(ge=0, le=100)


assert model in [one.id for one in api.models.list()]
assert api.completions.create(model=model, prompt="1, 2, 3,", max_tokens=4, temperature=0).choices[0].text
ask = {"model": model, "messages": [{"role": "user", "content": "Name a tree."}], "temperature": 0, "max_tokens": 16}
whole = api.chat.completions.create(**ask).choices[0].message.content
chunks = api.chat.completions.create(**ask, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
given = ask | {"max_tokens": 100}
assert api.chat.completions.parse(**given, response_format=Tree).choices[0].message.parsed
asked = {"model": model, "input": "Name a tree.", "temperature": 0, "max_output_tokens": 16}
answer = api.responses.create(**asked)
*_, last = api.responses.create(**asked, stream=True)
assert last.response.output_text == answer.output_text
again = api.responses.create(model=model, input="Why?", previous_response_id=answer.id, max_output_tokens=8)
assert again.usage.input_tokens_details.cached_tokens > 0
parsed = api.responses.parse(model=model, input="A tree.", text_format=Tree, max_output_tokens=100, temperature=0)
assert parsed.output_parsed
tool = {"type": "function", "name": "plant", "parameters": Tree.model_json_schema(), "strict": False}
called = api.responses.create(model=model, input="An oak.", tools=[tool], tool_choice="required", max_output_tokens=80)
assert json.loads(called.output[0].arguments).keys() == {"name", "height"}
print("models, completions, chats, responses, typed answers, calls")
