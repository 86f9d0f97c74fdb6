"""ShallowMeta: the record of an encoded prefix's KV (BiCache)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from radix import Node, path
from runtime.reuse.bicache.depth_table import DepthTable
from runtime.reuse.bicache.measured import Measured


@dataclass(frozen=True, slots=True)
class ShallowMeta:
    """The record of a run in the tree, from which a reader learns in how many layers it may be reused.

    Under bidirectional attention the KV of a token depends on the whole input, so on the end of the prefix. A split
    leaves both parts with the same record, as the numbers count from the root.

    Attributes:
        encoded_tokens: length of the encoded prefix, with this run's tokens and those behind them.
        table: depths and similarities by the prefix's share of a request, which only its reader knows.
        measured: what was measured while it was served.
    """

    encoded_tokens: int
    table: DepthTable
    measured: Measured = field(default_factory=Measured, compare=False)

    @property
    def tokens(self) -> int:
        return self.encoded_tokens

    def depth(self, length: int, ratio: float) -> int:
        """Layers in which the first `length` tokens may be reused by a request of which they are `ratio` (0 to 1)."""
        return self.table.partial_depth(ratio, length / self.encoded_tokens)

    def describe(self) -> dict[str, Any]:
        table, measured = self.table, self.measured.describe()
        return {
            **({"measured": measured} if measured else {}),
            "encoded_tokens": self.encoded_tokens,
            "depth_table": table.version,
            "depths": {str(ratio): depth for ratio, depth in sorted(table.depths.items())},
            "similarity": {
                str(ratio): round(layers[min(table.depths[ratio], len(layers)) - 1], 4)
                for ratio, layers in sorted(table.similarity.items())
                if table.depths.get(ratio)
            },
        }

    def meet(self, other: ShallowMeta) -> ShallowMeta | None:
        """The record of two runs that are used together; None for different tables, whose depths do not compare.

        The shorter encoding covers the smaller share of a request, and the depth of reuse grows with that share.
        """
        if self.table.version != other.table.version:
            return None
        return self if self.encoded_tokens <= other.encoded_tokens else other


def meet_all(node: Node | None) -> ShallowMeta | None:
    """The record of all runs on the path that ends in `node`; None if one has none, or there is no path."""
    found, *others = [above.meta for above in path(node)] or [None]
    for meta in others:
        found = found.meet(meta) if isinstance(found, ShallowMeta) and isinstance(meta, ShallowMeta) else None
    return found if isinstance(found, ShallowMeta) else None
