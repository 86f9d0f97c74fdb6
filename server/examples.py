"""Answers as the OpenAPI document shows them."""

from __future__ import annotations

import json
from typing import Any

_GENERATED: dict[str, Any] = {
    "text": " Paris.",
    "output_ids": [7042, 30],
    "meta_info": {
        "id": "98eecf86d5da4b95bb2093d2d41ded5e",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "queue_time": 0.0004,
        "prefill_time": 0.07,
        "e2e_latency": 0.12,
    },
}
_ENVELOPE = {
    "created": 1767225600,
    "model": "smollm2-135m-instruct",
    "system_fingerprint": "ramet-float32-cpu",
}
_USAGE = {"usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}
_CHAT: dict[str, Any] = {"id": "chatcmpl-98eecf86d5da", "object": "chat.completion", **_ENVELOPE}
_TEXT: dict[str, Any] = {"id": "cmpl-98eecf86d5da", "object": "text_completion", **_ENVELOPE}
_END = {"index": 0, "logprobs": None, "finish_reason": "stop"}


def _responses(whole: dict[str, Any], event: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """A route's success as JSON and, with `stream`, as events."""
    stream = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
    content = {
        "application/json": {"schema": {}, "example": whole},
        "text/event-stream": {"schema": {"type": "string"}, "example": stream},
    }
    return {200: {"description": "the answer, or with `stream` its events", "content": content}}


GENERATE = _responses(_GENERATED, {**_GENERATED, "delta": "."})
COMPLETIONS = _responses(
    {**_TEXT, "choices": [{**_END, "text": " Paris."}], **_USAGE}, {**_TEXT, "choices": [{**_END, "text": " Paris."}]}
)
CHAT = _responses(
    {**_CHAT, "choices": [{**_END, "message": {"role": "assistant", "content": "Hello!", "refusal": None}}], **_USAGE},
    {**_CHAT, "object": "chat.completion.chunk", "choices": [{**_END, "delta": {"content": "Hello!"}}]},
)
