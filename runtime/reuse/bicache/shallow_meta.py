"""ShallowMeta: the record of an encoded prefix's KV (BiCache)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runtime.reuse.bicache.depth_table import DepthTable
from runtime.reuse.bicache.measured import Measured


@dataclass(frozen=True, slots=True)
class ShallowMeta:
    """The record of a run in the tree, from which a reader learns in how many layers it may be reused.

    Under bidirectional attention the KV of a token depends on the whole input, so on the end of the prefix. A split
    leaves both parts with the same record, as its numbers count from the root.

    Attributes:
        encoded_tokens: length of the encoded prefix, with this run's tokens and those behind them.
        table: depths and similarities by the prefix's share of a request, which only its reader knows.
        measured: divergences measured while it was served.
    """

    encoded_tokens: int
    table: DepthTable
    measured: Measured = field(default_factory=Measured, compare=False)

    @property
    def tokens(self) -> int:
        return self.encoded_tokens

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
