"""BiCache's cost model: the forward rows of a diffusion request with a shared prefix."""


def modelled_passes(refreshes: float, others: float, ratio: float, depth: float) -> float:
    """Cost in passes over all rows.

    Args:
        refreshes: number of steps that compute the prefix's rows in layers without reuse; all steps without a cache.
        others: number of steps that do not compute the prefix's rows.
        ratio: the prefix's share of the rows.
        depth: share of the layers that are reused.
    """
    return refreshes * (1 - ratio * depth) + others * (1 - ratio)
