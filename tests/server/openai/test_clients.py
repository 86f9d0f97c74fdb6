"""LangChain and LiteLLM, unchanged, and the rest of what the `openai` client can ask for; on the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import openai
import pytest
from pydantic import BaseModel

from tests.server.openai.test_openai import CHAT, MODEL

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 16}, "height": {"type": "integer"}},
    "required": ["name", "height"],
    "additionalProperties": False,
}


class Tree(BaseModel):
    name: str
    height: int


def test_answers_that_are_json(api):
    options = {"model": MODEL, "messages": [{"role": "user", "content": "A tree, as JSON"}], "temperature": 0}
    shape = {"type": "json_schema", "json_schema": {"name": "tree", "schema": SCHEMA, "strict": True}}
    one = api.chat.completions.create(**options, max_tokens=80, response_format=shape).choices[0]
    assert json.loads(one.message.content).keys() == {"name", "height"}
    assert one.finish_reason == "stop"
    chunks = list(api.chat.completions.create(**options, max_tokens=80, response_format=shape, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == one.message.content
    free = api.chat.completions.create(**options, max_tokens=40, response_format={"type": "json_object"})
    assert free.choices[0].message.content.lstrip().startswith("{")
    parsed = api.chat.completions.parse(**options, max_tokens=200, response_format=Tree).choices[0]
    assert isinstance(parsed.message.parsed, Tree)


def test_seed_stop_bias_and_the_names_of_limits(api):
    options = {"model": MODEL, "messages": CHAT, "seed": 3, "temperature": 1.2}
    first = api.chat.completions.create(**options, max_completion_tokens=10)
    second = api.chat.completions.create(**options, max_tokens=10)
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.system_fingerprint == second.system_fingerprint
    assert first.system_fingerprint.startswith("ramet-")
    greedy = {"model": MODEL, "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 12}
    assert api.completions.create(**greedy, stop=[" 6"]).choices[0].text == " 5,"
    answer = api.completions.create(**greedy, logit_bias={"216": -100}, logprobs=0)
    assert " " not in answer.choices[0].logprobs.tokens


def test_a_prompt_is_scored_without_an_answer(api):
    answer = api.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=0, echo=True, logprobs=0, temperature=0
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("The capital of France is", "length")
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert answer.usage.completion_tokens == 0


def test_generate_takes_sglang_names(client):
    sampling = {"regex": "[0-9]{3}", "max_new_tokens": 8, "sampling_seed": 4, "temperature": 1}
    bodies = [{"text": "Number:", "sampling_params": sampling}] * 2
    first, second = (client.post("/generate", json=body).json() for body in bodies)
    assert first["text"] == second["text"]
    assert len(first["text"]) == 3
    assert first["text"].isdigit()
    schema = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 80, "temperature": 0}
    answer = client.post("/generate", json={"text": "A tree:", "sampling_params": schema}).json()
    assert json.loads(answer["text"]).keys() == {"name", "height"}


def test_the_asynchronous_client(server):
    import asyncio

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
            stream = await api.chat.completions.create(
                model=MODEL, messages=CHAT, max_tokens=6, temperature=0, stream=True
            )
            return [chunk.choices[0].delta.content or "" async for chunk in stream]

    assert "".join(asyncio.run(main()))


def test_langchain(server, client):
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    model = chat(base_url=f"{server.url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=60, max_retries=0,
                 stream_usage=True)  # fmt: skip
    answer = model.invoke("Name a tree.")
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    chunks = list(model.stream("Name a tree."))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 0
    assert len(model.batch(["One.", "Two."])) == 2
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Tree, method=method).invoke("A tree."), Tree)

    def plant(name: str, number: int) -> str:
        """Plant some trees of one kind."""
        return name * number

    called = model.bind_tools([plant], tool_choice="plant").invoke("Plant two oaks.")
    assert called.tool_calls[0]["name"] == "plant"
    assert called.tool_calls[0]["args"].keys() == {"name", "number"}


def _litellm_python() -> str | None:
    given = os.environ.get("RAMET_LITELLM_PYTHON")
    return given or (sys.executable if find_spec("litellm") is not None else None)


@pytest.mark.skipif(_litellm_python() is None, reason="needs LiteLLM, here or at $RAMET_LITELLM_PYTHON")
def test_litellm(server, client):
    script = Path(__file__).with_name("litellm_client.py")
    command = [_litellm_python(), str(script), server.url, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["streamed"] == found["texts"][0]
    assert len(found["texts"]) == 2
    assert found["logprobs"] > 0
    assert found["streamed_usage"]
    assert found["fingerprint"].startswith("ramet-")
    assert json.loads(found["shaped"]).keys() == json.loads(found["called"]).keys() == {"n"}
    assert found["completed"].startswith(" 3")
    assert "temperature" in found["refused"]
