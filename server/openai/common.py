"""Fields that responses of completions and chat completions share."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from runtime.frontend.output import Output
from server.context import Context
from server.http.errors import NotFound


def check_model(name: str, context: Context) -> None:
    """Raise NotFound unless `name` is the served model."""
    served = context.engine.info.name
    if name != served:
        raise NotFound(
            f"the model {name!r} does not exist; this server has {served!r}", param="model", code="model_not_found"
        )


def envelope(kind: str, rid: str, context: Context) -> dict[str, Any]:
    """The first fields of every response and chunk."""
    info = context.engine.info
    return {
        "id": rid,
        "object": kind,
        "created": int(time.time()),
        "model": info.name,
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
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in prompts.values())},
    }


def reuse_of(output: Output) -> dict[str, Any]:
    """The field `reuse` of an answer, or of one of several choices, of which each may reuse something else."""
    return {"reuse": output.reuse} if output.reuse and "strategy" in output.reuse else {}


def finish_reason(output: Output) -> str | None:
    """`stop`, `length` or `abort`; None before the end."""
    return None if output.finish is None else output.finish.type
