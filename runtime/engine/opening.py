"""Messages become requests."""

from __future__ import annotations

import time
from array import array

from radix import Namespace
from runtime.errors import InvalidRequest
from runtime.params import Lazy, SamplingParams
from runtime.protocol import AddRequest, ModelInfo
from runtime.request import Place, Request, Sequence
from runtime.reuse.strategy import Strategy
from runtime.sampling.decoding import Decoding


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
    request = Request(
        rid=message.rid,
        sequence=Sequence(tokens),
        prompt_len=len(tokens),
        sampling=sampling,
        stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
        max_tokens=len(tokens) + limit,
        strategy=strategy,
        decoding=decoding,
        namespace=message.namespace,
        # Of what tenants share, each one that computes some pays for it; where nobody is named, the salt does.
        owner=Namespace(message.account) if message.account else message.namespace.owner,
        logprobs=message.logprobs,
        prompt_logprobs_from=message.prompt_logprobs_from,
        priority=message.priority,
        store=message.store,
        explain=message.explain,
        keep=[Place(end, ttl_s) for end, ttl_s in sorted(message.keep)],
        serial=serial,
        arrival_s=time.monotonic(),
    )
    decoding.open(request, message.diffusion or {})
    strategy.open(request, message.reuse or {})
    _check_positions(request, info.context_length)
    return request


def _check_positions(request: Request, context_length: int) -> None:
    """Raise InvalidRequest where the sequence's last position, which need not be an index, is beyond the context.

    Segments are found later: a strategy that lets requests place them checks their positions in `open`.
    """
    last = request.sequence.position(request.max_tokens - 1) + 1
    if last > context_length:
        raise InvalidRequest(
            f"the request's positions go up to {last}; the model's context is {context_length} tokens",
            param="prompt",
            code="context_length_exceeded",
        )
