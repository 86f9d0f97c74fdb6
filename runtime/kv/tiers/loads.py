"""Blocks on their way into the pool."""

from __future__ import annotations

from array import array
from concurrent.futures import Future
from dataclasses import dataclass, field

from radix import Namespace
from runtime.kv.tiers.block import Block
from runtime.kv.tiers.worker import Loaded
from runtime.request import Run, Segment


@dataclass(slots=True, eq=False)
class Part:
    """The blocks of one run that a load brings.

    Attributes:
        first_page: of the run, at which the first block begins.
        blocks: that are wanted, in the order of the run.
        loading: the first of them, as far as a store has them; None: not begun.
        found: its result.
        kept: the part of the run that lies in the tree, locked while the blocks are put into the pool.
        fresh: pages for what follows.
        filling: that they are filled; None: not begun.
    """

    run: Run
    first_page: int
    blocks: list[Block]
    loading: Future[list[Loaded]] | None = None
    found: list[Loaded] = field(default_factory=list)
    kept: Segment = field(default_factory=lambda: Segment(array("i"), 0))
    fresh: Segment = field(default_factory=lambda: Segment(array("i"), 0))
    filling: Future[None] | None = None


@dataclass(slots=True, eq=False)
class Load:
    """KV that a waiting request lacks, as far as stores have it; other requests may wait for it, too.

    Attributes:
        owner: pays for the pages.
        num_bytes: most that it will bring.
        asked_s: when it was asked for.
        deadline_s: when its requests go on without what has not come; None: not begun.
        is_void: whether what it brings was flushed or erased meanwhile.
        tokens: that came, by store, once it has ended.
    """

    parts: list[Part]
    owner: Namespace
    num_bytes: int
    asked_s: float
    deadline_s: float | None = None
    is_void: bool = False
    tokens: dict[str, int] = field(default_factory=dict)
