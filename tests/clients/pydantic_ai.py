"""Pydantic AI: chats and responses, typed output."""

import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, model = sys.argv[1:]
provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
settings = {"max_tokens": 100, "temperature": 0.0}


class Tree(BaseModel):
    name: str = Field(max_length=16)
    height: int = Field(ge=0, le=100)


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    assert Agent(kind(model, provider=provider), model_settings=settings).run_sync("Name a tree.").output
    typed = Agent(kind(model, provider=provider), output_type=Tree, model_settings=settings, retries=3)
    assert typed.run_sync("An oak of 20 m.").output
print("chats, responses, typed output")
