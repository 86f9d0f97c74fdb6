"""ShallowMeta: the record of an encoded prefix's KV (BiCache)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radix import Node, path


@dataclass(frozen=True, slots=True)
class ShallowMeta:
    """The record of a run in the tree.

    Under bidirectional attention the KV of a token depends on the whole input, so on the end of the prefix. A split
    leaves both parts with the same record, as the numbers count from the root.

    Attributes:
        encoded_tokens: length of the encoded prefix, with this run's tokens and those behind them.
        profile: version of the depth table.
        similarity: cosine similarity to the KV under full input, by layer; None: not measured.
    """

    encoded_tokens: int
    profile: str
    similarity: tuple[float, ...] | None = None

    def describe(self) -> dict[str, Any]:
        known = self.similarity is not None
        return {"encoded_tokens": self.encoded_tokens, "depth_table": self.profile, "similarity_known": known}

    def meet(self, other: ShallowMeta) -> ShallowMeta | None:
        """The record of two runs that are used together: the weaker of both.

        The shorter encoding covers the smaller share of a request, and the depth of reuse grows with that share;
        similarity is the smaller one in each layer. None for different profiles: their depths do not compare.
        """
        if self.profile != other.profile:
            return None
        similarity = None
        if self.similarity is not None and other.similarity is not None:
            similarity = tuple(map(min, zip(self.similarity, other.similarity, strict=True)))
        return ShallowMeta(min(self.encoded_tokens, other.encoded_tokens), self.profile, similarity)


def meet_all(node: Node | None) -> ShallowMeta | None:
    """The record of all runs on the path that ends in `node`; None if one has none, or there is no path."""
    found, *others = [above.meta for above in path(node)] or [None]
    for meta in others:
        found = found.meet(meta) if isinstance(found, ShallowMeta) and isinstance(meta, ShallowMeta) else None
    return found if isinstance(found, ShallowMeta) else None
