"""Messages between a front end and the engine: msgspec structs, msgpack on the wire."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from radix import Namespace, WhyGone
from runtime.config import ModelCode
from runtime.params import Algorithm

FinishType = Literal["stop", "length", "abort", "error"]


class AddRequest(msgspec.Struct, tag="add"):
    """One sequence to generate.

    Attributes:
        rid: unique among live requests.
        tokens: the prompt, int32 little-endian, as one bytes object (the radix tree's key as well).
        sampling: `SamplingParams.model_dump()`.
        namespace: requests of different namespaces never share pages.
        account: whose quota the pages count against; empty: the namespace's owner's.
        logprobs: number of alternatives to report for each output token; None: no log-probabilities.
        prompt_logprobs_from: position from which prompt tokens get log-probabilities; None: none.
        priority: waiting requests with a larger one are served first.
        diffusion: `DiffusionParams.model_dump()`, filled, for a diffusion model.
        reuse: options of a reuse strategy, with its name as `method`; None: the model's default strategy.
        explain: whether its first event tells its `Lookup`.
        store: whether the KV that it computes may outlive it.
        keep: (tokens, seconds): the prompt's whole pages up to there are kept for its tenant, for that time from their
            last use on, as far as the budget of pins allows.
    """

    rid: str
    tokens: bytes
    sampling: dict[str, Any]
    namespace: Namespace = Namespace()
    account: str = ""
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    priority: int = 0
    diffusion: dict[str, Any] | None = None
    reuse: dict[str, Any] | None = None
    explain: bool = False
    store: bool = True
    keep: list[tuple[int, float]] = []


class Abort(msgspec.Struct, tag="abort"):
    """End a request now; a request that is not live is ignored."""

    rid: str


class _Call(msgspec.Struct):
    """A message that is answered by a `Reply` of the same number."""

    call: int


class FlushCache(_Call, tag="flush"):
    """Drop the unreferenced pages of the tree.

    `pins`: the pinned ones, too; `tiers`: all that lies in tiers, too.
    """

    pins: bool = False
    tiers: bool = False


class EraseTenant(_Call, tag="erase"):
    """Drop a tenant's pages that no live request uses, its pins, and all that it has in tiers."""

    tenant: str


class AttachTier(_Call, tag="attach"):
    """Add a tier; `options`: fields of `TierConfig`. Answer: `{"tiers": names}` or `{"failed": why}`."""

    options: dict[str, Any]


class DetachTier(_Call, tag="detach"):
    """Leave a tier, whose blocks stay where they are. Answer: `{"found": bool}`."""

    name: str


class LoadAdapter(_Call, tag="load_adapter"):
    """Load the low-rank adapter in a directory. Answer: `{"digest", "rank"}` or `{"failed": why}`."""

    path: str


class UnloadAdapter(_Call, tag="unload_adapter"):
    """Forget an adapter once its requests have ended. Answer: `{"running": how many there are}`."""

    digest: str


class GetState(_Call, tag="state"):
    """Ask for counters and gauges."""


class AddPin(_Call, tag="pin"):
    """Pin the whole pages of a prefix, computed first if need be. Answer: `{"pin"}` or `{"refused"}`.

    With `reuse`, as of an `AddRequest`, its entries are pinned, and `tokens` may be empty: `{"pins"}` or `{"refused"}`.
    """

    tokens: bytes
    namespace: Namespace = Namespace()
    account: str = ""
    name: str | None = None
    ttl_s: float | None = None
    reuse: dict[str, Any] | None = None

    @property
    def rid(self) -> str:
        """Id of the request that computes what is missing; an `Abort` of it ends the call."""
        return f"(pin {self.call})"


class RemovePin(_Call, tag="unpin"):
    """Remove a pin. Answer: `{"found": bool}`."""

    pin: str


class GetPins(_Call, tag="pins"):
    """Ask for all pins."""


class GetCached(_Call, tag="cached"):
    """Ask how many tokens of entries are cached; fields as of an `AddPin`. Answer: by entry."""

    reuse: dict[str, Any]
    namespace: Namespace = Namespace()
    tokens: bytes = b""


class GetTree(_Call, tag="tree"):
    """Ask for a page of the tree's nodes; see `radix.view`.

    `tenant`: of the nodes; None: all tenants. `preview_tokens`: most leading tokens to show of each run.
    """

    tenant: str | None = None
    max_depth: int | None = None
    skip: int = 0
    limit: int = 256
    preview_tokens: int = 0


class GetOutline(_Call, tag="outline"):
    """Advance the walk that makes the tree's outline, or begin `anew`; see `Admin.outline`.

    `tenant`: of the nodes; None: all tenants.
    """

    limit: int
    preview_tokens: int = 0
    anew: bool = False
    tenant: str | None = None


class GetRuns(_Call, tag="runs"):
    """Ask for the next slice of the tree's nodes with their tokens, or, `anew`, for the first; see `Admin.runs`.

    `tenant`, `salt`: of the nodes; None: all.
    """

    tenant: str | None
    salt: str | None
    anew: bool


class GetRequests(_Call, tag="requests"):
    """Ask for the live requests of a tenant (None: of all), oldest first, `limit` at most."""

    limit: int
    tenant: str | None = None


class GetQuota(_Call, tag="quota"):
    """Ask for a tenant's cached pages, and how many it may keep."""

    tenant: str


class OnNode(_Call, tag="node"):
    """Pin, unpin, evict or read one node of the tree; see `Admin`."""

    verb: Literal["pin", "unpin", "drop", "read"]
    page: int
    start: int


class Pause(_Call, tag="pause"):
    """Stop running steps, or resume. Answer: `{"paused": bool}`."""

    paused: bool


class Ping(_Call, tag="ping"):
    """Ask for a sign of life, which comes between two steps."""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Abort all requests and end the engine process."""


Call = (
    FlushCache | GetState | AddPin | RemovePin | GetPins | GetCached | GetTree | GetOutline | GetRuns | GetRequests
    | GetQuota | OnNode | Pause | Ping | EraseTenant | AttachTier | DetachTier | LoadAdapter | UnloadAdapter
)  # fmt: skip
Inbound = AddRequest | Abort | Call | Shutdown


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
        refused: whether an error is the request's own fault.
        code, param: of an error.
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
        found: leading tokens that were there, those of a page in part included.
        readable: leading tokens that the request could read; -1: the cache is off.
        page_size: tokens in a page.
        other: int32, the first tokens with which another prompt of the same namespace goes on behind them.
        why: cause for which the first missing page left the cache, `gone_s` seconds ago; None: it is not known.
        known_s: seconds for which such causes have been remembered, by then.
    """

    found: int
    readable: int
    page_size: int
    other: bytes = b""
    why: WhyGone | None = None
    gone_s: float = 0.0
    known_s: float = 0.0


class Place(msgspec.Struct):
    """A place up to which a prompt was to be kept.

    Attributes:
        tokens: the place.
        ttl_s: seconds from the last use on.
        kept: tokens that are kept, whole pages; 0: none.
        reason: why none is.
    """

    tokens: int
    ttl_s: float
    kept: int = 0
    reason: str | None = None


class CacheBooks(msgspec.Struct):
    """Books of a prompt's tokens: read + created + input are all of them.

    Attributes:
        read: read from the cache.
        created: computed now and kept, by seconds to live: of several kept places, a token counts for the longest.
        input: computed now and not kept.
        places: those of the request, in order.
    """

    read: int
    created: dict[float, int]
    input: int
    places: list[Place]


class TokenEvent(msgspec.Struct, array_like=True, gc=False):
    """One request's results of a step; exactly one event of a request has `finish` set, its last.

    `cached_tokens` counts prompt tokens whose KV came from the cache at first admission, `loaded_tokens` those of them
    that had been loaded from a tier for this request, by tier. Times are seconds:
    `queue_s` from arrival in the engine to first admission, `prefill_s` from there to the first token. `drafted`
    tokens were verified so far, of which `accepted` were right. For
    diffusion models, `reuse` describes the reused KV, and `canvas` holds all output positions, if they were asked for.
    `lookup` is on the first event of a request that asks for it, unless its KV is reused in other ways than by prefix.
    The first event of a request with places to keep has their `cache`.
    """

    rid: str
    tokens: list[int]
    finish: Finish | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    loaded_tokens: dict[str, int] = {}
    queue_s: float = 0.0
    prefill_s: float = 0.0
    reuse: dict[str, Any] | None = None
    canvas: list[int] | None = None
    lookup: Lookup | None = None
    cache: CacheBooks | None = None
    drafted: int = 0
    accepted: int = 0


class StepEvents(msgspec.Struct, tag="events"):
    """All events of an engine step."""

    events: list[TokenEvent]


class Reply(msgspec.Struct, tag="reply"):
    """The answer to a call."""

    call: int
    result: dict[str, Any]


class Ready(msgspec.Struct, tag="ready"):
    """The engine has loaded its model; `info` is a `ModelInfo` as a dict."""

    info: dict[str, Any]


class Failed(msgspec.Struct, tag="failed"):
    """The engine could not start."""

    message: str


Outbound = StepEvents | Reply | Ready | Failed

inbound_decoder = msgspec.msgpack.Decoder(Inbound)
outbound_decoder = msgspec.msgpack.Decoder(Outbound)
encode = msgspec.msgpack.Encoder().encode


class DiffusionInfo(msgspec.Struct):
    """Properties of a diffusion model.

    Attributes:
        mask_token_id: the token at undecided positions; -1: there is none.
        algorithm: its default sampler.
        num_layers: most layers that can be reused.
        depth_table: name of the table of reuse depths.
        refresh_interval: steps between refreshes of a prefix's other layers, unless a request says otherwise.
        attended, block, threshold, edits, defaults: see `runtime.models.diffusion.DiffusionSpec`.
        depth_bound: nats that measured depths may bring, unless a request says otherwise; None: nothing is measured.
    """

    mask_token_id: int
    algorithm: Algorithm
    num_layers: int
    depth_table: str
    refresh_interval: int
    attended: int | None = None
    block: int = 32
    threshold: float | None = None
    edits: bool = False
    depth_bound: float | None = None
    defaults: dict[str, int | float] = {}


class ModelInfo(msgspec.Struct):
    """Properties of the loaded model and the pool."""

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
    diffusion: DiffusionInfo | None = None
    model_impl: ModelCode = "ramet"
