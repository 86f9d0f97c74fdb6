"""OpenAI's Agents SDK, which asks for responses."""

import sys

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

url, model = sys.argv[1:]
set_tracing_disabled(True)
api = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
settings = ModelSettings(max_tokens=400, temperature=0)
agent = Agent("Gardener", instructions="Be brief.", model=OpenAIResponsesModel(model, api), model_settings=settings)
assert Runner.run_sync(agent, "Say hello.").final_output
print("responses")
