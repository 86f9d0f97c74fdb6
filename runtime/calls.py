"""Operators' calls on a running engine. A part of the engine answers each: `runtime.engine.part.Part.answers`."""

from typing import Literal

import msgspec

from radix import Namespace
from runtime.asks import ReuseAsk


class FlushCache(msgspec.Struct, tag="flush"):
    """Drop the pages that no live request uses. `pins`: also pinned pages; `tiers`: also all blocks in tiers.

    Answer: `flushed_tokens`, `live_tokens`; with `tiers`, `erased_blocks` by tier, None for a tier that failed.
    """

    pins: bool = False
    tiers: bool = False


class EraseTenant(msgspec.Struct, tag="erase"):
    """Drop a tenant's pages that no live request uses, its pins, and its blocks in tiers.

    Answer: `erased_tokens`, and `erased_blocks` as for `FlushCache`.
    """

    tenant: str


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Load the low-rank adapter in a directory. Answer: `digest`, `rank`."""

    path: str


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """Unload an adapter once its requests have ended. Answer: `running`, the number of requests that still use it."""

    digest: str


class AddPin(msgspec.Struct, tag="pin"):
    """Pin the whole pages of a prefix; missing ones are computed first. Answer: `pin`.

    With `ask`, as in an `AddRequest`, the entries named there are pinned, and `tokens` may be empty. Answer: `pins`.
    """

    tokens: bytes
    namespace: Namespace = Namespace()
    account: str = ""
    name: str | None = None
    ttl_s: float | None = None
    ask: ReuseAsk | None = None


class ComputeNextTurn(msgspec.Struct, tag="next_turn"):
    """Compute the whole pages of a prompt's beginning while no request is live; fields as in an `AddRequest`.

    Answer: empty, at once.
    """

    tokens: bytes
    namespace: Namespace = Namespace()
    account: str = ""
    hold_s: float | None = None


class RemovePin(msgspec.Struct, tag="unpin"):
    """Remove a pin. Answer: `found`."""

    pin: str


class GetPins(msgspec.Struct, tag="pins"):
    """Answer: `pins`; `kept`, sums by tenant of kept prefixes; `pinned_tokens`, of both; `budget_tokens`."""


class GetCached(msgspec.Struct, tag="cached"):
    """Fields as in an `AddPin`. Answer: number of cached tokens by the entry's name."""

    ask: ReuseAsk | None
    namespace: Namespace = Namespace()
    tokens: bytes = b""


class GetState(msgspec.Struct, tag="state"):
    """Answer: counters, histograms and gauges of the engine by name. Counters and histograms only grow."""


class GetTree(msgspec.Struct, tag="tree"):
    """Answer: `nodes`, up to `limit` nodes of the tree after the first `skip`, parents first, as `radix.NodeView`.

    `tenant`: None: all tenants. `preview_tokens`: number of leading tokens to show of each node.
    """

    tenant: str | None = None
    max_depth: int | None = None
    skip: int = 0
    limit: int = 256
    preview_tokens: int = 0


class GetOutline(msgspec.Struct, tag="outline"):
    """Answer: the tree in at most `limit` `blocks`, as `radix.Block`, and the last `evictions`.

    `tenant`: None: all tenants. The first outline starts the count of the reasons for misses.
    """

    limit: int
    preview_tokens: int = 0
    tenant: str | None = None


class GetRuns(msgspec.Struct, tag="runs"):
    """Answer: `runs`, the next slice of all nodes with their tokens, parents first; None after the last slice.

    `tenant`, `salt`: None: all. `anew`: start a new walk with the first slice. The engine has one walk at a time.
    """

    tenant: str | None
    salt: str | None
    anew: bool


class GetRequests(msgspec.Struct, tag="requests"):
    """Answer: `requests`, the oldest `limit` live requests of `tenant`; None: of all tenants."""

    limit: int
    tenant: str | None = None


class GetQuota(msgspec.Struct, tag="quota"):
    """Answer: a tenant's `used_pages` in the tree and its `quota_pages`; both None without a quota."""

    tenant: str


class OnNode(msgspec.Struct, tag="node"):
    """Pin, unpin, evict or read one node of the tree, named by its first page and the number of tokens before it.

    The node is found as long as it begins with that page. Answer: `found`; for pin `pin`; for unpin `pins`, the removed
    ids; for drop `tokens`, the number evicted; for read `tokens`, int32, from the root to the node's end.
    """

    verb: Literal["pin", "unpin", "drop", "read"]
    page: int
    start: int


class Pause(msgspec.Struct, tag="pause"):
    """Stop running steps, or resume. Answer: `paused`."""

    paused: bool


class Ping(msgspec.Struct, tag="ping"):
    """Ask whether the engine is alive; it answers between two steps. Answer: empty."""


Call = (
    FlushCache | EraseTenant | LoadAdapter | UnloadAdapter | AddPin | ComputeNextTurn
    | RemovePin | GetPins | GetCached | GetState | GetTree | GetOutline | GetRuns | GetRequests | GetQuota | OnNode
    | Pause | Ping
)  # fmt: skip
