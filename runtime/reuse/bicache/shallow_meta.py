"""ShallowMeta: what the KV of an encoded prefix was computed for (BiCache)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radix import Node, path


@dataclass(frozen=True, slots=True)
class ShallowMeta:
    """The record of a run in the tree.

    Under bidirectional attention the KV of a token depends on the whole input, so on where the prefix ended. A split
    leaves both parts with the same record, for the numbers count from the root.

    Attributes:
        encoded_tokens: length of the prefix that was encoded, this run's tokens and those behind them included.
        profile: version of the depth table that was measured with such prefixes.
        similarity: cosine similarity to the KV under full input, by layer; None: it was not measured.
    """

    encoded_tokens: int
    profile: str
    similarity: tuple[float, ...] | None = None

    def describe(self) -> dict[str, Any]:
        """See `radix.Meta`."""
        known = self.similarity is not None
        return {"encoded_tokens": self.encoded_tokens, "depth_table": self.profile, "similarity_known": known}

    def meet(self, other: ShallowMeta) -> ShallowMeta | None:
        """The promise of two runs that are used together: the weaker of both.

        The shorter encoding has seen the smaller share of a request, and the depth that may be reused grows with that
        share; similarity is the smaller one in each layer. None for different profiles: their depths do not compare.
        """
        if self.profile != other.profile:
            return None
        similarity = None
        if self.similarity is not None and other.similarity is not None:
            similarity = tuple(map(min, zip(self.similarity, other.similarity, strict=True)))
        return ShallowMeta(min(self.encoded_tokens, other.encoded_tokens), self.profile, similarity)


def meet_all(node: Node | None) -> ShallowMeta | None:
    """The promise of all runs on the path that ends in `node`; None where one has no record, or there is no path."""
    found, *others = [above.meta for above in path(node)] or [None]
    for meta in others:
        found = found.meet(meta) if isinstance(found, ShallowMeta) and isinstance(meta, ShallowMeta) else None
    return found if isinstance(found, ShallowMeta) else None
