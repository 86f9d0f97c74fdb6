"""What a diffusion model's cached prefix was computed for (BiCache)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShallowMeta:
    """Under bidirectional attention the KV of a token depends on the whole input, so on where the prefix ended.

    A split leaves both parts with the same record, for the numbers count from the root.

    Attributes:
        encoded_tokens: length of the prefix that was encoded, this run's tokens and what stood behind them included.
        profile: version of the depth table that was measured with such prefixes.
        similarity: cosine similarity to the KV under full input, by layer, where it was measured; None: it was not.
    """

    encoded_tokens: int
    profile: str
    similarity: tuple[float, ...] | None = None

    def meet(self, other: ShallowMeta) -> ShallowMeta | None:
        """What can be promised of two runs that are used together: the weaker of both.

        The shorter encoding has seen the smaller share of a request, and the depth that may be reused grows with that
        share; similarity is the smaller one in each layer. None for different profiles: their depths do not compare.
        """
        if self.profile != other.profile:
            return None
        similarity = None
        if self.similarity is not None and other.similarity is not None:
            similarity = tuple(map(min, zip(self.similarity, other.similarity, strict=True)))
        return ShallowMeta(min(self.encoded_tokens, other.encoded_tokens), self.profile, similarity)
