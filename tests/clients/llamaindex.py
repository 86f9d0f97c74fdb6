"""LlamaIndex' OpenAI-like model: a chat, a stream, a completion, documents."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]
llm = OpenAILike(model=model, api_base=f"{url}/v1", api_key="none", is_chat_model=True, max_tokens=16, max_retries=0)
assert llm.chat([ChatMessage(role="user", content="Name a tree.")]).message.content
assert "".join(part.delta or "" for part in llm.stream_chat([ChatMessage(role="user", content="Name a tree.")]))
assert llm.complete("Name a tree.").text
fields = {"documents": [{"text": "An oak is a tree."}], "reuse": {"method": "legolink"}}
answer = llm.chat([ChatMessage(role="user", content="Name a tree.")], extra_body=fields)
assert answer.raw.model_extra["reuse"]["method"] == "legolink"
print("chats, streams, completions, documents")
