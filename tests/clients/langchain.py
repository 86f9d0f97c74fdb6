"""LangChain's chat models of OpenAI (chats and responses) and Anthropic."""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:]


class Tree(BaseModel):
    """A tree."""

    name: str = Field(max_length=16)
    height: int = Field(ge=0, le=100)


for responses in (False, True):
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=100, max_retries=0,
                      use_responses_api=responses)  # fmt: skip
    assert chat.invoke("Name a tree.").usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in chat.stream("Name a tree."))
    assert isinstance(chat.with_structured_output(Tree).invoke("A tree."), Tree)
    assert chat.bind_tools([Tree], tool_choice="Tree").invoke("An oak.").tool_calls
claude = ChatAnthropic(base_url=url, api_key="none", model=model, max_tokens=16, max_retries=0)
assert claude.invoke("Name a tree.").content
print("chats, responses, messages")
