"""Operators' calls on a running engine, and their answers. A part of the engine answers each: `Part.answers`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import ClassVar, Generic, Self, TypeVar, get_args

import msgspec

from radix import Eviction, Namespace
from radix.stats import Histogram
from radix.views import Block, NodeView
from runtime.asks import ReuseAsk

A = TypeVar("A", covariant=True)

# Answers a call, at once or over several steps: the engine advances a generator between steps.
Handler = Callable[["EngineCall[object]"], object | Generator[None, None, object]]
# Handlers with the classes of calls that they answer: `EngineCall.by`.
Answers = Iterable[tuple[type["EngineCall[object]"], Handler]]


class EngineCall(msgspec.Struct, Generic[A]):
    """Base of the calls; `A`: the type of the answer."""

    __orig_bases__: ClassVar[tuple[object, ...]]

    @classmethod
    def by(cls, handler: Callable[[Self], A | Generator[None, None, A]]) -> tuple[type[EngineCall[object]], Handler]:
        """This class of calls, and the handler that answers them."""

        def answer(call: EngineCall[object]) -> object | Generator[None, None, object]:
            assert isinstance(call, cls)
            return handler(call)

        return cls, answer

    def read(self, answer: msgspec.Raw) -> A:
        """The answer from the wire."""
        (kind,) = get_args(self.__orig_bases__[0])
        found: A = msgspec.msgpack.decode(answer, type=kind)
        return found


class Owned(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant has; `tenant`: its account, or the name of its API key in the answers of routes."""

    tenant: str


class Flushed(msgspec.Struct, frozen=True, omit_defaults=True):
    """Number of tokens that were dropped and that stay; with `tiers`, of blocks by tier, None for one that failed."""

    flushed_tokens: int
    live_tokens: int
    erased_blocks: dict[str, int | None] | None = None


class FlushCache(EngineCall[Flushed], tag="flush"):
    """Drop the pages that no live request uses. `pins`: also pinned pages; `tiers`: also all blocks in tiers."""

    pins: bool = False
    tiers: bool = False


class Erased(msgspec.Struct, frozen=True):
    """Number of tokens that were dropped, and of blocks by tier, None for one that failed."""

    erased_tokens: int
    erased_blocks: dict[str, int | None]


class EraseTenant(EngineCall[Erased], tag="erase"):
    """Drop a tenant's pages that no live request uses, its pins, and its blocks in tiers."""

    tenant: str


class LoadedAdapter(msgspec.Struct, frozen=True):
    """Digest of an adapter's configuration and weights, and rank of its matrices."""

    digest: str
    rank: int


class LoadAdapter(EngineCall[LoadedAdapter], tag="load_adapter"):
    """Load the low-rank adapter in a directory."""

    path: str


class UnloadAdapter(EngineCall[int], tag="unload_adapter"):
    """Unload an adapter once its requests have ended. Answer: number of requests that still use it."""

    digest: str


class PinView(Owned, frozen=True, kw_only=True):
    """A pin. `hits`: uses of its prefix; `expires_in_s`: None: it does not expire."""

    id: str
    name: str | None
    tokens: int
    hits: int
    expires_in_s: float | None


class AddPin(EngineCall[list[PinView]], tag="pin"):
    """Pin the whole pages of a prefix; missing ones are computed first. Answer: the pin.

    With `ask`, as in an `AddRequest`, the entries named there are pinned, each with an own pin; `tokens` may be empty.
    """

    tokens: bytes
    namespace: Namespace = Namespace()
    account: str = ""
    name: str | None = None
    ttl_s: float | None = None
    ask: ReuseAsk | None = None


class ComputeNextTurn(EngineCall[None], tag="next_turn"):
    """Compute the whole pages of a prompt's beginning while no request is live; fields as in an `AddRequest`.

    It is answered at once.
    """

    tokens: bytes
    namespace: Namespace = Namespace()
    account: str = ""
    hold_s: float | None = None


class RemovePin(EngineCall[bool], tag="unpin"):
    """Remove a pin. Answer: whether it was there."""

    pin: str


class KeptPrefixes(Owned, frozen=True, kw_only=True):
    """The prefixes that are kept for a tenant: their number, and that of their tokens."""

    prefixes: int
    tokens: int


class AllPins(msgspec.Struct, frozen=True):
    """`pinned_tokens`: number of tokens of both; `budget_tokens`: the most that they may have."""

    pins: list[PinView]
    kept: list[KeptPrefixes]
    pinned_tokens: int
    budget_tokens: int


class GetPins(EngineCall[AllPins], tag="pins"):
    """All pins and kept prefixes."""


class GetCached(EngineCall[dict[str, int]], tag="cached"):
    """Fields as in an `AddPin`. Answer: number of cached tokens by the entry's name."""

    ask: ReuseAsk | None
    namespace: Namespace = Namespace()
    tokens: bytes = b""


class TierState(msgspec.Struct, frozen=True):
    """A tier; `capacity`: in bytes, None: the store has no bound of its own; `open`: false if the tier failed.

    `queued_bytes` wait to be written. `latency_s` and `bytes_per_s` are those of loads; `counts`: events by name.
    """

    bytes: int
    blocks: int
    capacity: int | None
    queued_bytes: int
    open: bool
    latency_s: float
    bytes_per_s: float
    counts: dict[str, int]


class State(msgspec.Struct):
    """The engine's counters, histograms and gauges by name. Counters and histograms only grow.

    Attributes:
        figures: counters and gauges. `float` alone would make 1 to 1.0 in an answer.
        labelled: counters by cause, tenant and the like.
    """

    figures: dict[str, int | float] = {}
    labelled: dict[str, dict[str, int]] = {}
    histograms: dict[str, Histogram] = {}
    tiers: dict[str, TierState] = {}

    def __getitem__(self, figure: str) -> int | float:
        return self.figures[figure]

    def flat(self) -> dict[str, object]:
        """All in one mapping, as routes show it; `tiers` only if there are some."""
        tiers = {"tiers": self.tiers} if self.tiers else {}
        found: dict[str, object] = msgspec.to_builtins({**self.figures, **self.labelled, **self.histograms, **tiers})
        return found


class GetState(EngineCall[State], tag="state"):
    """All figures of the engine."""


class Nodes(msgspec.Struct, frozen=True):
    """`tiers`: names of the tiers that hold the first page of a node, by the node's id; None: there are no tiers."""

    nodes: list[NodeView]
    tiers: dict[int, list[str]] | None


class GetTree(EngineCall[Nodes], tag="tree"):
    """Up to `limit` nodes of the tree after the first `skip`, parents first.

    `tenant`: None: all tenants. `preview_tokens`: number of leading tokens to show of each node.
    """

    tenant: str | None = None
    max_depth: int | None = None
    skip: int = 0
    limit: int = 256
    preview_tokens: int = 0


class Outline(msgspec.Struct, frozen=True):
    """The tree in few blocks, their `tiers` as in `Nodes`, and the last evictions."""

    blocks: list[Block]
    tiers: dict[int, list[str]] | None
    evictions: list[Eviction]


class GetOutline(EngineCall[Outline], tag="outline"):
    """The tree in at most `limit` blocks.

    `tenant`: None: all tenants. The first outline starts the count of the reasons for misses.
    """

    limit: int
    preview_tokens: int = 0
    tenant: str | None = None


class TreeRun(Owned, frozen=True, kw_only=True):
    """A node of the tree: `key`, its tokens as int32, `start`, the number of those before it; as in `NodeView`."""

    id: int
    parent: int | None
    start: int
    key: bytes
    hits: int
    pinned: bool


class GetRuns(EngineCall[list[TreeRun] | None], tag="runs"):
    """Answer: the next slice of all nodes with their tokens, parents first; None after the last slice.

    `tenant`, `salt`: None: all. `anew`: start a new walk with the first slice. The engine has one walk at a time.
    """

    tenant: str | None
    salt: str | None
    anew: bool


class LiveRequest(Owned, frozen=True, kw_only=True):
    """A live request, without its text. `computed_tokens`: of the prompt; `phase`: what it does or waits for."""

    rid: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    age_s: float
    phase: str


class GetRequests(EngineCall[list[LiveRequest]], tag="requests"):
    """The oldest `limit` live requests of `tenant`; None: of all tenants."""

    limit: int
    tenant: str | None = None


class Quota(msgspec.Struct, frozen=True):
    """Pages that a tenant has in the tree, and may have; both None without a quota."""

    quota_pages: int | None
    used_pages: int | None


class GetQuota(EngineCall[Quota], tag="quota"):
    """A tenant's quota."""

    tenant: str


class OnNode(EngineCall[A], Generic[A]):
    """Base of calls on the node of the tree that begins with a page. Answer: None if there is none.

    `page`: the node's first page; `start`: number of tokens before it.
    """

    page: int
    start: int


class PinNode(OnNode[PinView | None], tag="pin_node"):
    """Pin the prefix that ends with the node."""


class UnpinNode(OnNode[list[str] | None], tag="unpin_node"):
    """Remove the pins that hold the node. Answer: their ids."""


class DropNode(OnNode[int | None], tag="drop_node"):
    """Evict the node and what is below it. Answer: number of evicted tokens."""


class ReadNode(OnNode[bytes | None], tag="read_node"):
    """Answer: the tokens from the root to the node's end, int32."""


class Pause(EngineCall[bool], tag="pause"):
    """Stop running steps, or resume. Answer: whether the engine is paused."""

    paused: bool


class Ping(EngineCall[None], tag="ping"):
    """Ask whether the engine is alive; it answers between two steps."""


AnyCall = (
    FlushCache | EraseTenant | LoadAdapter | UnloadAdapter | AddPin | ComputeNextTurn
    | RemovePin | GetPins | GetCached | GetState | GetTree | GetOutline | GetRuns | GetRequests | GetQuota
    | PinNode | UnpinNode | DropNode | ReadNode | Pause | Ping
)  # fmt: skip
