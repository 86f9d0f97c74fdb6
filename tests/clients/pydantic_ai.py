"""Pydantic AI: chats, responses and messages, typed output."""

import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, model = sys.argv[1:]
openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
anthropic = AnthropicProvider(base_url=url, api_key="none")
settings = {"max_tokens": 100, "temperature": 0.0}


class Tree(BaseModel):
    name: str = Field(max_length=16)
    height: int = Field(ge=0, le=100)


for kind, provider in ((OpenAIChatModel, openai), (OpenAIResponsesModel, openai), (AnthropicModel, anthropic)):
    assert Agent(kind(model, provider=provider), model_settings=settings).run_sync("Name a tree.").output
    typed = Agent(kind(model, provider=provider), output_type=Tree, model_settings=settings, retries=3)
    assert typed.run_sync("An oak of 20 m.").output
print("chats, responses, messages, typed output")
