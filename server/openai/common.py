"""Fields that responses of completions and chat completions share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from runtime.frontend.output import Output
from server.context import Context
from server.http.answers import JsonList
from server.openai.caching import cache_usage


def envelope(kind: str, rid: str, context: Context, model: str) -> dict[str, Any]:
    """The first fields of a response, or of all its chunks; `model`: its name."""
    info = context.engine.info
    return {
        "id": rid,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"ramet-{info.dtype}-{info.attention_backend}",
    }


def usage(outputs: Iterable[Output]) -> dict[str, Any]:
    """Token counts over the last Outputs of a call; each prompt counts once, not for every choice."""
    outputs = list(outputs)
    prompts = {output.index: output for output in outputs if output.choice == 0}
    prompt = sum(output.prompt_tokens for output in prompts.values())
    completion = sum(output.completion_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": cache_usage(prompts.values()),
    }


def most_logprobs(of_answer: int | None, of_prompt: int | None) -> int | None:
    """Alternatives that the engine reports for every token, where answer and prompt may want different ones."""
    return max((count for count in (of_answer, of_prompt) if count is not None), default=None)


def add_prompt_logprobs(written: JsonList, output: Output, most: int | None, text_of: Callable[[int], str]) -> None:
    """Add vLLM's log-probabilities of prompt tokens: dicts by token id, with those of `most` alternatives."""
    for item in (output.prompt_logprobs or ()) if most is not None else ():
        if item.logprob is None:  # of the first token
            written.append(None)
            continue
        ranks = {token: rank for rank, (token, _) in enumerate(item.top, start=1)}
        values = {token: value for token, value in item.top[:most]} | {item.token: item.logprob}
        entries = {
            str(token): {"logprob": value, "rank": ranks.get(token), "decoded_token": text_of(token)}
            for token, value in values.items()
        }
        written.append(entries)


def reuse_of(output: Output) -> dict[str, Any]:
    """The field `reuse` of an answer, or of one of several choices, of which each may reuse something else."""
    return {"reuse": output.reuse} if output.reuse and "strategy" in output.reuse else {}


def finish_reason(output: Output) -> str | None:
    """`stop`, `length` or `abort`; None before the end."""
    return None if output.finish is None else output.finish.type
