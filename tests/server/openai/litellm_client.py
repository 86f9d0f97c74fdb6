"""LiteLLM against a server: run with an interpreter that has it, as it wants another `openai` than Ramet's tests.

`python litellm_client.py URL MODEL` prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices

import litellm


def main(url: str, model: str) -> None:
    where = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    ask = [{"role": "user", "content": "Name a tree."}]
    options = {"messages": ask, "max_tokens": 12, "seed": 1, "stop": ["\n\n"], "logit_bias": {"5": -10}, "user": "me"}
    whole = litellm.completion(**where, **options, n=2, logprobs=True, top_logprobs=2)
    stream = list(litellm.completion(**where, **options, stream=True, stream_options={"include_usage": True}))
    shape = {"name": "t", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
                                     "additionalProperties": False}}  # fmt: skip
    shaped = litellm.completion(
        **where, messages=ask, max_tokens=30, response_format={"type": "json_schema", "json_schema": shape}
    )
    tool = {"type": "function", "function": {"name": "plant", "parameters": shape["schema"]}}
    called = litellm.completion(**where, messages=ask, max_tokens=60, tools=[tool], tool_choice="required")
    text = litellm.text_completion(
        **{**where, "model": f"text-completion-openai/{model}"}, prompt="1, 2,", max_tokens=4
    )
    try:
        litellm.completion(**{**where, "temperature": -1}, messages=ask, max_retries=0)
        refused = None
    except litellm.BadRequestError as error:
        refused = str(error)
    print(
        json.dumps(
            {
                "texts": [choice.message.content for choice in whole.choices],
                "logprobs": len(whole.choices[0].logprobs.content),
                "fingerprint": whole.system_fingerprint,
                "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices),
                "streamed_usage": [chunk.usage.completion_tokens for chunk in stream if getattr(chunk, "usage", None)],
                "shaped": shaped.choices[0].message.content,
                "called": called.choices[0].message.tool_calls[0].function.arguments,
                "completed": text.choices[0].text,
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
