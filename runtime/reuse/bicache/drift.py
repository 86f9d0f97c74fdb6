"""Distances of keys and values: drift, which says when to refresh (after Elastic-Cache), and the reach of a depth."""

from __future__ import annotations

import numpy as np
import torch

from runtime.kv.pool import KVPool

# Of cached and fresh values, over the norm of these. It says where to measure, and nothing else.
_NEAR = 0.3


class Drift:
    """The drift of keys and values of the prompt's rows behind the prefix since the last refresh.

    These rows are computed at every step, and their tokens stay. Their keys and values change as those of the
    prefix's rows would, which nobody computes between refreshes.

    Attributes:
        threshold: a refresh is due above it.
        value: distance to the keys and values at the refresh over the norm of these, in the layer where it is largest.
        known: whether there are such rows.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.value = 0.0
        self.known = False
        self._at_refresh = torch.empty(0)

    @property
    def is_due(self) -> bool:
        return self.value > self.threshold

    def note(self, pool: KVPool, slots: np.ndarray, layers: range, refreshed: bool) -> None:
        """Take the rows in `slots` after a step; `layers`: those in which the prefix is refreshed."""
        if not len(slots) or not layers:
            return
        rows = torch.from_numpy(slots).to(pool.k.device)
        both = [half[layers.start : layers.stop].index_select(1, rows).flatten(1) for half in (pool.k, pool.v)]
        now = torch.cat(both, dim=1).float()
        self.known = True
        if refreshed:
            self._at_refresh, self.value = now, 0.0
        else:
            # A depth that was measured at the refresh may have moved the first of the layers.
            now, then = now[-len(self._at_refresh) :], self._at_refresh[-len(now) :]
            self.value = float(((now - then).norm(dim=1) / then.norm(dim=1)).max())


def num_near_layers(pool: KVPool, fresh: np.ndarray, cached: np.ndarray) -> int:
    """Leading layers in which the values in the slots `cached` lie near those in `fresh`, int64 [n] each.

    Keys have large constant parts, which hide how far they part.
    """
    at_fresh, at_cached = (torch.from_numpy(slots).to(pool.v.device) for slots in (fresh, cached))
    for number, layer in enumerate(pool.v):
        now, then = (layer.index_select(0, rows).float() for rows in (at_fresh, at_cached))
        if not (now - then).norm() <= _NEAR * now.norm():
            return number
    return len(pool.v)
