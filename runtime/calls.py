"""Operators' calls on a running engine. A part of the engine answers each: `runtime.engine.part.Part.answers`."""

from typing import Any, Literal

import msgspec

from radix import Namespace


class FlushCache(msgspec.Struct, tag="flush"):
    """Drop the pages that no live request uses; `pins`: pinned ones too; `tiers`: all that lies in tiers too.

    Answer: `flushed_tokens`, `live_tokens`; with `tiers`, `erased_blocks` by tier, None for one that failed.
    """

    pins: bool = False
    tiers: bool = False


class EraseTenant(msgspec.Struct, tag="erase"):
    """Drop a tenant's pages that no live request uses, its pins, and all that it has in tiers.

    Answer: `erased_tokens`, and `erased_blocks` as for `FlushCache`.
    """

    tenant: str


class AttachTier(msgspec.Struct, tag="attach"):
    """Add a tier; `options`: fields of `TierConfig`. Answer: `tiers`, the names of all."""

    options: dict[str, Any]


class DetachTier(msgspec.Struct, tag="detach"):
    """Detach a tier, whose blocks stay where they are. Answer: `found`."""

    name: str


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Load the low-rank adapter in a directory. Answer: `digest`, `rank`."""

    path: str


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """Forget an adapter once its requests have ended. Answer: `running`, the number of these."""

    digest: str


class AddPin(msgspec.Struct, tag="pin"):
    """Pin the whole pages of a prefix; missing ones are computed first. Answer: `pin`.

    With `reuse`, as in an `AddRequest`, its entries are pinned, and `tokens` may be empty. Answer: `pins`.
    """

    tokens: bytes
    namespace: Namespace = Namespace()
    account: str = ""
    name: str | None = None
    ttl_s: float | None = None
    reuse: dict[str, Any] | None = None


class RemovePin(msgspec.Struct, tag="unpin"):
    """Remove a pin. Answer: `found`."""

    pin: str


class GetPins(msgspec.Struct, tag="pins"):
    """Answer: all `pins`, the sums that tenants have `kept`, `pinned_tokens` of both, and `budget_tokens`."""


class GetCached(msgspec.Struct, tag="cached"):
    """Fields as in an `AddPin`. Answer: cached tokens by the entry's name."""

    reuse: dict[str, Any]
    namespace: Namespace = Namespace()
    tokens: bytes = b""


class GetState(msgspec.Struct, tag="state"):
    """Answer: counters and histograms, which only grow, and gauges."""


class GetTree(msgspec.Struct, tag="tree"):
    """Answer: `nodes`, one page of the tree's nodes, parents first, as `radix.NodeView`.

    `tenant`: None: of all tenants. `preview_tokens`: most leading tokens to show of each node.
    """

    tenant: str | None = None
    max_depth: int | None = None
    skip: int = 0
    limit: int = 256
    preview_tokens: int = 0


class GetOutline(msgspec.Struct, tag="outline"):
    """Answer: the tree in at most `limit` `blocks`, as `radix.Block`, and the last `evictions`.

    `tenant`: None: of all tenants. From the first outline on, the reasons of misses are counted.
    """

    limit: int
    preview_tokens: int = 0
    tenant: str | None = None


class GetRuns(msgspec.Struct, tag="runs"):
    """Answer: `runs`, the next slice of all nodes with their tokens, parents first; None behind the last.

    `tenant`, `salt`: None: of all. `anew`: begin with the first slice. The engine makes one walk at a time.
    """

    tenant: str | None
    salt: str | None
    anew: bool


class GetRequests(msgspec.Struct, tag="requests"):
    """Answer: the oldest `limit` live `requests` of a tenant; None: of all."""

    limit: int
    tenant: str | None = None


class GetQuota(msgspec.Struct, tag="quota"):
    """Answer: a tenant's `used_pages` in the tree and its `quota_pages`; both None where there is no quota."""

    tenant: str


class OnNode(msgspec.Struct, tag="node"):
    """Pin, unpin, evict or read one node of the tree, named by its first page and the number of tokens before it.

    The node is found as long as it begins with that page. Answer: `found`, and by verb: `pin`; `pins`, the removed ids;
    `tokens`, the number of evicted ones; `tokens`, int32, all tokens from the root to the node's end.
    """

    verb: Literal["pin", "unpin", "drop", "read"]
    page: int
    start: int


class Pause(msgspec.Struct, tag="pause"):
    """Stop running steps, or resume. Answer: `paused`."""

    paused: bool


class Ping(msgspec.Struct, tag="ping"):
    """A sign of life, which comes between two steps. Answer: nothing."""


Call = (
    FlushCache | EraseTenant | AttachTier | DetachTier | LoadAdapter | UnloadAdapter | AddPin | RemovePin | GetPins
    | GetCached | GetState | GetTree | GetOutline | GetRuns | GetRequests | GetQuota | OnNode | Pause | Ping
)  # fmt: skip
