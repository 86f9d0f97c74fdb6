"""BiCache's cost model: the forward rows of a diffusion request with a shared prefix."""


def modelled_passes(refreshes: float, others: float, ratio: float, depth: float) -> float:
    """Cost in passes over all rows.

    Args:
        refreshes: steps that compute the prefix's rows in the layers that are not reused; without a cache, all.
        others: steps that do not compute them.
        ratio: the prefix's share of the rows.
        depth: share of the layers that are reused.
    """
    return refreshes * (1 - ratio * depth) + others * (1 - ratio)
