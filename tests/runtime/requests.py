"""Requests without an engine."""

from array import array
from collections.abc import Sequence as Tokens
from typing import Any

from runtime.kv.segments import Sequence
from runtime.params import SamplingParams
from runtime.protocol import AddRequest
from runtime.request import Request
from runtime.sampler_state import SamplerState


def make_request(
    tokens: Tokens[int],
    new: int = 99,
    sampling: SamplingParams | None = None,
    prompt_len: int | None = None,
    strategy: Any = None,
    lease: Any = None,
    serial: int = 0,
    **message: Any,
) -> Request:
    """A request of which the first `prompt_len` tokens are the prompt, by default all; `message`: its fields."""
    params = sampling or SamplingParams()
    length = len(tokens) if prompt_len is None else prompt_len
    message = {"rid": "r", "tokens": b""} | message
    request = Request(
        AddRequest(**message),
        SamplerState(params, frozenset(params.stop_token_ids), message.get("prompt_logprobs_from")),
        Sequence(array("i", tokens)),
        length,
        length + new,
        strategy,
        None,
        serial,
    )
    request.lease = strategy.open(request, None) if strategy is not None else lease
    return request
