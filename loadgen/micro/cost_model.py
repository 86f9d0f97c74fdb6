"""What a diffusion request with a shared prefix costs in forward rows, as BiCache's cost model counts them."""

from __future__ import annotations


def modelled_passes(refreshes: float, others: float, ratio: float, depth: float) -> float:
    """Passes over all rows.

    Args:
        refreshes: steps that run the prefix's rows through the layers that are not reused; without a cache, all.
        others: steps that do not run them at all.
        ratio: the prefix's share of the rows.
        depth: share of the layers that are reused.
    """
    return refreshes * (1 - ratio * depth) + others * (1 - ratio)
