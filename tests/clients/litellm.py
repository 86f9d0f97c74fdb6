"""LiteLLM in three directions: chats, responses and messages, each served by its own route here."""

import asyncio
import sys

import litellm

url, model = sys.argv[1:]
where = {"api_base": f"{url}/v1", "api_key": "none"}
ask = [{"role": "user", "content": "Name a tree."}]
assert litellm.completion(model=f"openai/{model}", messages=ask, max_tokens=8, **where).choices[0].message.content
answer = litellm.responses(model=f"openai/{model}", input="Name a tree.", max_output_tokens=8, **where)
assert answer.output[0].content[0].text
claude = {"model": f"anthropic/{model}", "api_base": url, "api_key": "none", "max_tokens": 8}
assert litellm.completion(messages=ask, **claude).choices[0].message.content
message = asyncio.run(litellm.anthropic.messages.acreate(messages=ask, **claude))
assert message["content"]
print("chats, responses, messages")
