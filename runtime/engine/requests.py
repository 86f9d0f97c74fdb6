"""Makes requests from messages."""

import logging
import time
from array import array

import numpy as np

from runtime.asks import ReuseAsk
from runtime.errors import InvalidRequest, RametError
from runtime.kv.segments import Sequence
from runtime.protocol import AddRequest, Finish, ModelInfo
from runtime.request import Decoding, Request, Strategy
from runtime.sampler_state import SamplerState

log = logging.getLogger("ramet.engine")


def open_request(
    message: AddRequest, info: ModelInfo, strategy: Strategy[ReuseAsk | None], decoding: Decoding, serial: int
) -> Request:
    """The request of a message. Raises InvalidRequest if it can never be served."""
    tokens, ids = array("i"), np.frombuffer(message.tokens, np.int32)
    least = 0 if message.images is None else np.iinfo(np.int32).min
    if len(outside := ids[(ids < least) | (ids >= info.vocab_size)]):
        refused = f"token id {outside[0]} is out of range: the model has {info.vocab_size} tokens"
        raise InvalidRequest(refused, param="prompt")
    tokens.frombytes(message.tokens)
    sampling = message.sampling
    assert sampling is not None, "`Sampling.complete` has set it"
    eos = () if sampling.ignore_eos else info.eos_token_ids
    room = min(info.context_length, info.pool_tokens) - len(tokens)
    limit = room if sampling.max_new_tokens is None else sampling.max_new_tokens
    sampler = SamplerState(sampling, frozenset((*eos, *sampling.stop_token_ids)), message.prompt_logprobs_from)
    length = len(tokens)
    request = Request(message, sampler, Sequence(tokens), length, length + limit, strategy, decoding, serial)
    request.arrival_s = time.monotonic()
    decoding.open(request, message.decoding)
    request.lease = strategy.open(request, message.ask)
    # Segments are looked up later. A strategy whose requests choose positions for segments checks these in `open`.
    last = request.sequence.position(request.max_length - 1)
    for used, limit, what in (
        (last + 1, info.context_length, "positions; the model's context is"),
        (request.max_length + len(request.entry_tokens), info.pool_tokens, "tokens of KV; the pool holds"),
    ):
        if used > limit:
            refused = f"the request takes up to {used} {what} {limit} tokens"
            raise InvalidRequest(refused, param="prompt", code="context_length_exceeded")
    return request


def finish_of(error: Exception, rid: str) -> Finish:
    """The end of a request by an error. Of one that was not raised on purpose, the client learns the type alone."""
    if not isinstance(error, RametError):
        log.error("request %s failed", rid, exc_info=error)
        return Finish("error", message=f"the step that computed this request failed: {type(error).__name__}")
    refused = isinstance(error, InvalidRequest)
    return Finish("error", message=error.message, refused=refused, code=error.code, param=error.param)
