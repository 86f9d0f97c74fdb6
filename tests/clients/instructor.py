"""Instructor: typed answers by calls, by JSON and by schemas."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
api = OpenAI(base_url=f"{url}/v1", api_key="none")


class Tree(BaseModel, extra="forbid"):
    name: str = Field(max_length=16)
    height: int = Field(ge=0, le=100)


ask = {"model": model, "messages": [{"role": "user", "content": "An oak."}], "max_tokens": 100, "temperature": 0}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    assert instructor.from_openai(api, mode=mode).chat.completions.create(**ask, response_model=Tree)
print("calls, schemas")
