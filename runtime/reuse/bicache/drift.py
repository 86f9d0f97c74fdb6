"""Distances of keys and values: when to refresh a prefix (after Elastic-Cache), and which depth to measure next."""

import numpy as np
import torch

from runtime.kv.pool import KVPool

# Largest distance of cached from fresh values, over the norm of these. It only suggests the depth to measure next.
_NEAR = 0.3


class Drift:
    """How far keys and values have moved since the last refresh, measured on the prompt's rows behind the prefix.

    Each step computes these rows again, but not the prefix's, for which they stand in.

    Attributes:
        threshold: drift above which a refresh is due.
        value: the largest relative distance of a row, |now - at the refresh| / |at the refresh|.
        known: whether the prompt has such rows.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.value = 0.0
        self.known = False
        self._at_refresh = torch.empty(0)

    def note(self, pool: KVPool, slots: np.ndarray, layers: range, refreshed: bool) -> None:
        """Compare the rows in `slots` after a step; `layers`: the layers in which the prefix is refreshed."""
        if not len(slots) or not layers:
            return
        rows = torch.from_numpy(slots).to(pool.k.device)
        both = [half[layers.start : layers.stop].index_select(1, rows).flatten(1) for half in (pool.k, pool.v)]
        now = torch.cat(both, dim=1).float()
        self.known = True
        if refreshed:
            self._at_refresh, self.value = now, 0.0
        else:
            # A measurement at the refresh may have changed the depth, and so the first of the layers.
            now, then = now[-len(self._at_refresh) :], self._at_refresh[-len(now) :]
            self.value = float(((now - then).norm(dim=1) / then.norm(dim=1)).max())


def num_near_layers(pool: KVPool, fresh: np.ndarray, cached: np.ndarray) -> int:
    """The number of leading layers in which values in slots `cached` are near values in slots `fresh`, int64 [n] each.

    Keys are not compared: their large constant parts hide differences.
    """
    at_fresh, at_cached = (torch.from_numpy(slots).to(pool.v.device) for slots in (fresh, cached))
    for number, layer in enumerate(pool.v):
        now, then = (layer.index_select(0, rows).float() for rows in (at_fresh, at_cached))
        if not (now - then).norm() <= _NEAR * now.norm():
            return number
    return len(pool.v)
