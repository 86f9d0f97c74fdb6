"""LangChain, unchanged, on the real model; `make clients` runs more clients."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, Field

from tests.server.openai.test_openai import MODEL


class Tree(BaseModel):
    name: Literal["oak", "elm"]
    height: int = Field(ge=0, le=99)


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

    def plant(name: Literal["oak", "elm"], number: int) -> str:
        """Plant some trees of one kind."""
        return name * number

    called = model.bind_tools([plant], tool_choice="plant").invoke("Plant two oaks.")
    assert called.tool_calls[0]["name"] == "plant"
    assert called.tool_calls[0]["args"].keys() == {"name", "number"}
