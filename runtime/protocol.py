"""Messages between a front end and the engine: msgspec structs, msgpack on the wire."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec
from pydantic import BaseModel

from radix import Namespace, WhyGone
from runtime.asks import DECODING_PARAMS, DecodingInfo, DecodingParams, ImagesAsk, ReuseAsk, ReuseReport
from runtime.calls import AnyCall, EngineCall
from runtime.config import ModelCode
from runtime.errors import RametError
from runtime.params import Lazy, SamplingParams

A = TypeVar("A")
FinishType = Literal["stop", "length", "abort", "error"]


class Boot(msgspec.Struct):
    """The first line on an engine process's standard input.

    Attributes:
        config: JSON of a `Config`.
        path: the model's directory.
        inbox, outbox: ZeroMQ addresses.
    """

    config: str
    path: str
    quotas: dict[str, int]
    inbox: str
    outbox: str


class Limits(msgspec.Struct):
    """The sampling parameters of a completion that need not be those of the other completions of a body."""

    max_new_tokens: int | None
    min_new_tokens: int
    seed: int | None


class AddRequest(msgspec.Struct, tag="add"):
    """One sequence to generate.

    Attributes:
        rid: unique among live requests.
        tokens: the prompt, int32 little-endian, as one bytes object (the radix tree's key as well).
        sampling: None: that of the last `Sampling`, with `limits`.
        limits: what differs from the last `Sampling`.
        namespace: requests of different namespaces never share pages.
        account: tenant whose quota the pages count against; empty: the namespace's owner.
        logprobs: number of alternatives to report for each output token; None: no log-probabilities.
        prompt_logprobs_from: position from which prompt tokens get log-probabilities; None: none.
        priority: waiting requests with a larger one are served first.
        decoding: what is asked of a decoding that does not choose next tokens, with all defaults filled in.
        ask: what is asked of a reuse strategy; None: the model's default strategy serves the request.
        explain: whether the first event has a `Lookup`.
        store: whether the KV that the request computes may stay cached after its end.
        hold_s: seconds from its end on for which the prefixes that it used are held; None: the configured time.
        breakpoints: pairs (tokens, seconds): the whole pages of the prompt's first `tokens` tokens are kept for the
            tenant until they have been unused for `seconds`, as far as the budget of pins allows.
        progress: whether each step that computes a part of the prompt has an event.
        idle: whether it is a background request, which counts neither as a request nor as a use of the cache.
        bad_words: token sequences that the output does not contain; empty: those of the last `Sampling`.
        images: the images that runs of negative tokens stand for; None: the prompt has none.
    """

    rid: str
    tokens: bytes
    sampling: SamplingParams | None = None
    limits: Limits | None = None
    namespace: Namespace = Namespace()
    account: str = ""
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    priority: int = 0
    decoding: DecodingParams | None = None
    ask: ReuseAsk | None = None
    explain: bool = False
    store: bool = True
    hold_s: float | None = None
    breakpoints: list[tuple[int, float]] = []
    progress: bool = False
    idle: bool = False
    bad_words: list[list[int]] = []
    images: ImagesAsk | None = None


class Sampling(msgspec.Struct, tag="sampling"):
    """What the requests that follow have in common, until the next `Sampling`: it may be as large as a body.

    Attributes:
        params: for `AddRequest.sampling`.
        bad_words: as in an `AddRequest`.
        images: those of the last request, which the prompt's other completions share; they name no runs.
    """

    params: SamplingParams = msgspec.field(default_factory=lambda: SamplingParams())
    bad_words: list[list[int]] = []
    images: ImagesAsk | None = None

    def complete(self, request: AddRequest) -> AddRequest:
        """The request with what it lacks, which all requests share."""
        if request.sampling is None:
            own = {} if request.limits is None else msgspec.structs.asdict(request.limits)
            request.sampling = self.params.model_copy(update=own)
        request.bad_words = request.bad_words or self.bad_words
        if request.images is None or request.images.runs:
            self.images = request.images
        request.images = self.images
        return request


class Abort(msgspec.Struct, tag="abort"):
    """End a request now; a request that is not live is ignored."""

    rid: str


class CallEngine(msgspec.Struct, tag="call"):
    """An operator's call. A `Reply` with the same number answers it."""

    number: int
    call: AnyCall


class Forget(msgspec.Struct, tag="forget"):
    """Cancel a call, so that no reply follows. A number without an open call is ignored."""

    number: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Abort all requests and end the engine."""


Inbound = Sampling | AddRequest | Abort | CallEngine | Forget | Shutdown


class TokenLogprob(msgspec.Struct, array_like=True):
    """Natural-log probabilities of a token and of the most likely ones, under the model's own distribution."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


class Finish(msgspec.Struct):
    """The reason for a request's end.

    Attributes:
        matched: the stop token or string.
        message: text for an abort or an error.
        refused: whether the error is the request's own fault.
        code, param: see `RametError`.
    """

    type: FinishType
    matched: int | str | None = None
    message: str | None = None
    refused: bool = False
    code: str | None = None
    param: str | None = None


class Lookup(msgspec.Struct):
    """A prompt's look-up in the cache, when it was admitted.

    Attributes:
        found: number of leading tokens in the cache, including a part of a page.
        readable: number of leading tokens that the request could read; -1: the cache is off.
        page_size: tokens in a page.
        other: int32, the tokens with which the nearest other prompt of the namespace continues after `found` tokens.
        why: why the first missing page left the cache, `gone_s` seconds ago; None: unknown.
        known_s: seconds since the cache began to remember why pages leave.
        point: number of leading tokens before the nearest resume point; None: the model needs none.
        lost: number of tokens before a nearer one that has left the cache, as `why` and `gone_s` say; None: unknown.
    """

    found: int
    readable: int
    page_size: int
    other: bytes = b""
    why: WhyGone | None = None
    gone_s: float = 0.0
    known_s: float = 0.0
    point: int | None = None
    lost: int | None = None


class Breakpoint(msgspec.Struct):
    """A place in a prompt up to which the prompt is kept.

    Attributes:
        tokens: number of leading tokens of the prompt.
        ttl_s: time to live in seconds, counted from the last use.
        kept: number of tokens that are kept, in whole pages; 0: none.
        reason: why none are kept.
    """

    tokens: int
    ttl_s: float
    kept: int = 0
    reason: str | None = None


class CacheUsage(msgspec.Struct):
    """How a prompt's tokens used the cache: read + created + input is their number.

    Attributes:
        read: tokens read from the cache.
        created: tokens computed now and kept, by time to live in seconds; a token counts for its longest breakpoint.
        input: tokens computed now and not kept.
        breakpoints: the request's breakpoints, in order.
    """

    read: int
    created: dict[float, int]
    input: int
    breakpoints: list[Breakpoint]


class Admission(msgspec.Struct, array_like=True):
    """A request's first admission.

    Attributes:
        cached_tokens: prompt tokens whose KV came from the cache.
        loaded_tokens: of the cached tokens, those that tiers loaded for this request, by tier.
        queue_s: seconds from the request's arrival in the engine to its admission.
    """

    cached_tokens: int = 0
    loaded_tokens: dict[str, int] = {}
    queue_s: float = 0.0


class TokenEvent(msgspec.Struct, array_like=True, gc=False):
    """One request's results of a step; exactly one event of a request has `finish` set, its last.

    Attributes:
        tokens: new tokens.
        logprobs: log-probabilities of `tokens`.
        prompt_logprobs: log-probabilities of prompt tokens, in order.
        admission: in the request's first event.
        prefill_s: in the event with the first token: seconds since the admission.
        reuse: the strategy's report, if there is something new.
        shown: all output positions, decided or not, of a decoding that fills them in any order, if the request wants.
        lookup: in the first event, if the request wants it and KV is reused by prefix.
        usage: in the first event of a request with breakpoints.
        drafted, accepted: number of draft tokens that this step verified, and number of these that were right.
        computed: number of leading prompt tokens whose KV is there, if the request wants its progress; 0: unchanged.
    """

    rid: str
    tokens: list[int] = []
    finish: Finish | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    admission: Admission | None = None
    prefill_s: float = 0.0
    reuse: ReuseReport | None = None
    shown: list[int] | None = None
    lookup: Lookup | None = None
    usage: CacheUsage | None = None
    drafted: int = 0
    accepted: int = 0
    computed: int = 0


class StepEvents(msgspec.Struct, tag="events"):
    """All events of an engine step."""

    events: list[TokenEvent]


class Failure(msgspec.Struct):
    """A RametError on its way to the client; `kind`: the name of its class."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None

    @staticmethod
    def of(error: RametError) -> Failure:
        return Failure(type(error).__name__, error.message, error.param, error.code)

    def error(self) -> RametError:
        kinds = {kind.__name__: kind for kind in RametError.__subclasses__()}
        return kinds.get(self.kind, RametError)(self.message, param=self.param, code=self.code)


class Reply(msgspec.Struct, tag="reply"):
    """The answer to a `CallEngine`, encoded, or its failure."""

    number: int
    answer: msgspec.Raw = msgspec.Raw(b"\xc0")  # None
    failure: Failure | None = None

    def read(self, call: EngineCall[A]) -> A:
        """The answer to a call. Raises RametError if it failed."""
        if self.failure is not None:
            raise self.failure.error()
        return call.read(self.answer)


class ModelInfo(msgspec.Struct):
    """Properties of the loaded model and the pool.

    Attributes:
        decoding: settings of a decoding that does not choose next tokens; None: the model's does.
        attention_note: why torch computes on a GPU in place of FlashInfer, and what this costs; empty otherwise.
        quantization: how weights are computed: `none`, `int4`, `int8`, or the type of the checkpoint, such as `gguf` or
            `awq`; with `, unpacked` behind it if they are computed in `dtype`.
    """

    name: str
    path: str
    architecture: str
    vocab_size: int
    context_length: int
    eos_token_ids: list[int]
    dtype: str
    device: str
    attention_backend: str
    page_size: int
    pool_tokens: int
    decoding: DecodingInfo | None = msgspec.field(default=None, name="diffusion")
    model_impl: ModelCode = "ramet"
    max_running: int = 64
    attention_note: str = ""
    quantization: str = "none"


class Ready(msgspec.Struct, tag="ready"):
    """The engine has loaded its model."""

    info: ModelInfo


class Failed(msgspec.Struct, tag="failed"):
    """The engine could not start."""

    message: str


Outbound = StepEvents | Reply | Ready | Failed

# Parameters are checked by pydantic where they enter. On the wire they are maps with the name of their class.
_CLASS = "class"
_KINDS: tuple[type[BaseModel], ...] = (SamplingParams, Lazy, *DECODING_PARAMS)
_PARAMS = {one.__name__: one for one in _KINDS}


def _encode_params(params: object) -> dict[str, object]:
    name = next(kind.__name__ for kind in type(params).__mro__ if kind.__name__ in _PARAMS)
    fields = {field: getattr(params, field) for field in _PARAMS[name].model_fields}
    return fields | {_CLASS: name}


def _decode_params(_: type, fields: object) -> object:
    if not isinstance(fields, dict) or _CLASS not in fields:
        return fields
    kind = _PARAMS[fields.pop(_CLASS)]
    values = {name: _decode_params(kind, value) for name, value in fields.items()}
    return kind.model_construct(None, **values)


inbound_decoder = msgspec.msgpack.Decoder(Inbound, dec_hook=_decode_params)
outbound_decoder = msgspec.msgpack.Decoder(Outbound)
encode = msgspec.msgpack.Encoder(enc_hook=_encode_params).encode
