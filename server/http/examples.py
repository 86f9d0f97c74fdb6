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
_ENVELOPE = {"created": 1767225600, "model": "smollm2-135m-instruct", "system_fingerprint": "ramet-float32-cpu"}
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


def answers(example: Any, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """A route's success as JSON."""
    return {status: {"content": {"application/json": {"example": example}}}}


def says(text: str) -> dict[int | str, dict[str, Any]]:
    """A route's success as plain text."""
    return {200: {"content": {"text/plain": {"example": text}}}}


GENERATE = _responses(_GENERATED, {**_GENERATED, "delta": "."})
COMPLETIONS = _responses(
    {**_TEXT, "choices": [{**_END, "text": " Paris."}], **_USAGE}, {**_TEXT, "choices": [{**_END, "text": " Paris."}]}
)
CHAT = _responses(
    {**_CHAT, "choices": [{**_END, "message": {"role": "assistant", "content": "Hello!", "refusal": None}}], **_USAGE},
    {**_CHAT, "object": "chat.completion.chunk", "choices": [{**_END, "delta": {"content": "Hello!"}}]},
)

_ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello!"}]}
_RESPONSE: dict[str, Any] = {
    **{"id": "resp_98eecf86d5da", "object": "response", "created_at": 1767225600, "status": "completed"},
    **{"model": "smollm2-135m-instruct", "output": [_ANSWER]},
}
RESPONSES = _responses(_RESPONSE, {"type": "response.output_text.delta", "sequence_number": 4, "delta": "Hello!"})
RESPONSE = answers(_RESPONSE)
INPUT_ITEMS = answers(
    {
        "object": "list",
        "data": [
            {
                **{"id": "item_0_resp_98eecf86d5da", "type": "message", "role": "user", "status": "completed"},
                "content": [{"type": "input_text", "text": "What is a radix tree?"}],
            }
        ],
        **{"first_id": "item_0_resp_98eecf86d5da", "last_id": "item_0_resp_98eecf86d5da", "has_more": False},
    }
)
DELETED = answers({"id": "resp_98eecf86d5da", "object": "response", "deleted": True})
INPUT_TOKENS = answers({"object": "response.input_tokens", "input_tokens": 12})
_COUNTS = {
    **{"input_tokens": 12, "cache_creation_input_tokens": 1024, "cache_read_input_tokens": 4096, "output_tokens": 2},
    **{"cache_creation": {"ephemeral_5m_input_tokens": 1024, "ephemeral_1h_input_tokens": 0}},
    "service_tier": "standard",
    "breakpoints": [{"tokens": 5125, "kept_tokens": 5120, "ttl_s": 300.0, "reason": None}],
}
_MESSAGE: dict[str, Any] = {
    **{"id": "msg_98eecf86d5da", "type": "message", "role": "assistant", "model": "smollm2-135m-instruct"},
    **{"content": [{"type": "text", "text": "Hello!"}], "stop_reason": "end_turn", "stop_sequence": None},
    "usage": _COUNTS,
}
_DELTA = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello!"}}
MESSAGE = _responses(_MESSAGE, _DELTA)
COUNTED = answers({"input_tokens": 5132})

_MODEL: dict[str, Any] = {
    "id": "smollm2-135m-instruct",
    **{"object": "model", "created": 1767225600, "owned_by": "ramet", "root": "smollm2-135m-instruct"},
    **{"parent": None, "max_model_len": 8192},
}
MODEL = answers(_MODEL)
MODELS = answers({"object": "list", "data": [_MODEL]})
_PIN = {"id": "pin-1", "name": "system", "tenant": "alice", "tokens": 512, "hits": 1, "expires_in_s": 3600}
PIN = answers(_PIN)
_KEPT = {"tenant": "alice", "prefixes": 3, "tokens": 4096}
PINS = answers({"pins": [_PIN], "kept": [_KEPT], "pinned_tokens": 4608, "budget_tokens": 23296})
_SCHEMA: dict[str, Any] = {
    **{"id": "cities", "object": "schema", "mode": "independent", "length": 128, "tokens": 190},
    **{"pins": [], "expires_in_s": None},
}
_PLAN = {
    **{"path": "/plan", "start": 6, "stop": 27, "tokens": 17, "union": None},
    "parameters": [{"name": "days", "start": 11, "length": 4}],
}
_TEXT_OF_ALL = {"path": "/", "start": 0, "stop": 128, "tokens": 18, "union": None, "parameters": []}
SCHEMA = answers({**_SCHEMA, "modules": [_TEXT_OF_ALL, _PLAN], "cached_tokens": {"/": 18}})
SCHEMAS = answers({"object": "list", "data": [_SCHEMA]})
_DOCUMENT: dict[str, Any] = {
    **{"id": "doc-98eecf86d5da4b95bb2093d2d41ded5e", "object": "document", "title": "Rome", "tokens": 700},
    **{"pins": [], "expires_in_s": None},
}
DOCUMENT = answers({**_DOCUMENT, "chunks": 2, "cached": 700})
DOCUMENTS = answers({"object": "list", "data": [_DOCUMENT]})
SUCCESS = answers({"success": True})
STOPPING = answers({"success": True}, 202)
UNPINNED = answers({"unpinned": 1})
NODE = answers({"tokens": 2, "text": "Once upon"})
_QUOTA = {"quota_pages": 1024, "used_pages": 64, "quota_tokens": 16384, "used_tokens": 1024}
QUOTA = answers({"tenant": "alice", **_QUOTA})
EVICTED = answers({"evicted_tokens": 512})
ERASED = answers({"erased_tokens": 4096, "erased_blocks": {"host": 85, "disk": 85}})
_TIER = {
    **{"bytes": 93716480, "blocks": 85, "capacity": 8589934592, "queued_bytes": 0, "open": True},
    **{"latency_s": 0.0002, "bytes_per_s": 2.1e9, "counts": {"wanted": 173, "hits": 170, "misses": 3, "written": 85}},
}
TIERS = answers({"tiers": {"host": _TIER}, "loaded_tokens_by_tier": {"host": 4096}})
ATTACHED = answers({"tiers": ["host", "disk"]})
FLUSHED = answers({"success": True, "flushed_tokens": 4096, "live_tokens": 0})
_STATE = {
    **{"requests": 10, "running": 0, "waiting": 0, "queried_tokens": 5120, "cached_tokens": 4096},
    **{"pages_total": 2912, "pages_free": 2592, "pages_tree": 320, "pages_private": 0, "pages_locked": 0},
}
STATS = answers(_STATE)
_NODE = {
    **{"id": 0, "parent": None, "depth": 1, "start": 0, "tokens": 512, "pages": 32, "children": 2, "hits": 7},
    **{"idle_s": 3.5, "age_s": 60.0, "cost_s": 0.4, "locked": False, "pinned": True, "meta": None, "tenant": "alice"},
    **{"outlook": {"kind": "first turn", "age": 12, "promise": 0.004}, "tiers": ["host", "disk"]},
}
_FOUND = {
    **{"id": 32, "parent": 0, "start": 512, "tokens": 64, "tenant": "alice", "hits": 7, "pinned": False},
    **{"above": [0], "text": "the assistant of a shop for ship models."},
}
FOUND = answers({"nodes": [_FOUND], "searched_tokens": 576, "complete": True})
TREE = answers({"nodes": [_NODE], "next_cursor": None})
PAUSED = answers({"paused": True})
RESUMED = answers({"paused": False})
OK = says("ok")
PROBED = answers({"status": "ok"})
MODEL_INFO = answers(
    {
        **{"model_path": "smollm2-135m-instruct", "served_model_name": "smollm2-135m-instruct"},
        **{"architecture": "LlamaForCausalLM", "is_generation": True, "context_length": 8192, "vocab_size": 49152},
        **{"eos_token_ids": [2], "dtype": "bfloat16", "diffusion": None},
    }
)
SERVER_INFO = answers(
    {
        **{"model_path": "smollm2-135m-instruct", "served_model_name": "smollm2-135m-instruct", "version": "0.1.0"},
        "model_info": {"name": "smollm2-135m-instruct", "model_impl": "ramet", "pool_tokens": 46592},
        "config": {"scheduler": {"max_running": 64}, "server": {"port": 30000}},
        "state": _STATE,
    }
)
TOKENS = answers({"tokens": [504, 3575, 282, 4649, 314], "count": 5, "max_model_len": 8192})
TEXT = answers({"text": "The capital of France is", "prompt": "The capital of France is"})
TOKENIZER = answers({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "chat_template": "{% for ... %}"})
VERSION = answers({"version": "0.1.0"})
_LOAD = {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 0, "token_usage": 0.1}
LOADS = answers({"version": "0.1.0", "dp_rank_count": 1, "loads": [_LOAD], "aggregate": {"total_reqs": 3}})
_RUNNING = "sglang:num_running_reqs"
ADAPTER_LOADED = answers(
    {"success": True, "lora_name": "poems", "rank": 16, "digest": "0f9c4a3e7d5b4c1a8e2f6b7d9a1c3e5f"}
)
ADAPTER_UNLOADED = answers({"success": True, "running": 0})
METRICS = says(f'# TYPE {_RUNNING} gauge\n{_RUNNING}{{model_name="smollm2-135m-instruct"}} 0.0\n')
