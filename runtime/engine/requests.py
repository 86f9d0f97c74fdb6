"""Messages become requests."""

from __future__ import annotations

import time
from array import array

from runtime.errors import InvalidRequest
from runtime.kv.segments import Sequence
from runtime.params import Lazy, SamplingParams
from runtime.protocol import AddRequest, ModelInfo
from runtime.request import Decoding, Request, Strategy
from runtime.sampler_state import SamplerState


def open_request(message: AddRequest, info: ModelInfo, strategy: Strategy, decoding: Decoding, serial: int) -> Request:
    """The request of a message. Raises InvalidRequest where its strategy or its decoding cannot serve it."""
    tokens = array("i")
    tokens.frombytes(message.tokens)
    sampling = SamplingParams.model_construct(**message.sampling)
    if (lazy := message.sampling.get("lazy")) is not None:
        sampling.lazy = Lazy.model_construct(**lazy)
    eos = () if sampling.ignore_eos else info.eos_token_ids
    room = min(info.context_length, info.pool_tokens) - len(tokens)
    limit = room if sampling.max_new_tokens is None else sampling.max_new_tokens
    sampler = SamplerState(sampling, frozenset((*eos, *sampling.stop_token_ids)), message.prompt_logprobs_from)
    length = len(tokens)
    request = Request(message, sampler, Sequence(tokens), length, length + limit, strategy, decoding, serial)
    request.arrival_s = time.monotonic()
    decoding.open(request, message.diffusion or {})
    strategy.open(request, message.reuse or {})
    _check_positions(request, info.context_length)
    return request


def _check_positions(request: Request, context_length: int) -> None:
    """Raise InvalidRequest where the sequence's last position, which need not be an index, is beyond the context.

    Segments are found later: a strategy that lets requests place them checks their positions in `open`.
    """
    last = request.sequence.position(request.max_length - 1) + 1
    if last > context_length:
        raise InvalidRequest(
            f"the request's positions go up to {last}; the model's context is {context_length} tokens",
            param="prompt",
            code="context_length_exceeded",
        )
