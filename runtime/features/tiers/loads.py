"""Loads of blocks from the stores into the pool."""

from array import array
from concurrent.futures import Future
from dataclasses import dataclass, field

from radix import Namespace
from runtime.features.tiers.block import TierBlock
from runtime.features.tiers.worker import Loaded
from runtime.kv.segments import Run, Segment


@dataclass(slots=True, eq=False)
class RunLoad:
    """The part of a load that belongs to one run.

    Attributes:
        first_page: the page of the run at which the first block begins.
        blocks: the wanted blocks, in the order of the run.
        loading: reads the leading blocks that stores have; None: not begun.
        found: the result of `loading`.
        kept: the cached part of the run, locked while the pool is filled.
        fresh: new pages for the blocks that were found.
        filling: fills the new pages; None: not begun.
    """

    run: Run
    first_page: int
    blocks: list[TierBlock]
    loading: Future[list[Loaded]] | None = None
    found: list[Loaded] = field(default_factory=list)
    kept: Segment = field(default_factory=lambda: Segment(array("i"), 0))
    fresh: Segment = field(default_factory=lambda: Segment(array("i"), 0))
    filling: Future[None] | None = None


@dataclass(slots=True, eq=False)
class Load:
    """A load of KV from the stores, for which requests wait. Times are those of the clock of `Tiers`.

    Attributes:
        owner: the namespace whose quota the pages count against.
        num_bytes: bytes of all wanted blocks; the stores may have fewer.
        asked_s: the time at which a request asked for the load.
        deadline_s: the time at which the requests stop waiting; None: the load has not begun.
        is_void: whether the KV was erased meanwhile.
        tokens: loaded tokens by tier, once the load has ended.
    """

    parts: list[RunLoad]
    owner: Namespace
    num_bytes: int
    asked_s: float
    deadline_s: float | None = None
    is_void: bool = False
    tokens: dict[str, int] = field(default_factory=dict)
