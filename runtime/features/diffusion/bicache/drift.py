"""Distances of keys and values decide when to refresh a prefix (after Elastic-Cache) and which depth to try next."""

import numpy as np
import torch

from runtime.kv.pool import KVPool

# Largest |fresh - cached| / |fresh| of a layer whose values count as near. It only suggests the depth to measure next.
_NEAR = 0.3


class Drift:
    """How far keys and values have moved since the last refresh, measured on the prompt's rows after the prefix.

    Every step computes these rows. They stand in for the prefix's rows, which only a refresh computes.

    Attributes:
        threshold: drift above which a refresh is due.
        value: |now - at the refresh| / |at the refresh| over all these rows, in the layer where it is largest.
        known: whether the prompt has rows after the prefix.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.value = 0.0
        self.known = False
        self._at_refresh = torch.empty(0)

    def note(self, pool: KVPool, slots: np.ndarray, layers: range, refreshed: bool) -> None:
        """Update `value` after a step. `slots`: int64, the measured rows; `layers`: those that a refresh computes."""
        if not len(slots) or not layers:
            return
        rows = torch.from_numpy(slots).to(pool.k.device)
        both = [half[layers.start : layers.stop].index_select(1, rows).flatten(1) for half in (pool.k, pool.v)]
        now = torch.cat(both, dim=1).float()
        self.known = True
        if refreshed:
            self._at_refresh, self.value = now, 0.0
        else:
            # A measurement during the refresh may have changed the depth. Compare the layers that both steps have.
            now, then = now[-len(self._at_refresh) :], self._at_refresh[-len(now) :]
            self.value = float(((now - then).norm(dim=1) / then.norm(dim=1)).max())


def num_near_layers(pool: KVPool, fresh: np.ndarray, cached: np.ndarray) -> int:
    """Number of leading layers whose values in slots `cached`, int64 [n], are near the values in slots `fresh`.

    Keys are not compared: their large constant parts hide differences.
    """
    at_fresh, at_cached = (torch.from_numpy(slots).to(pool.v.device) for slots in (fresh, cached))
    for number, layer in enumerate(pool.v):
        now, then = (layer.index_select(0, rows).float() for rows in (at_fresh, at_cached))
        if not (now - then).norm() <= _NEAR * now.norm():
            return number
    return len(pool.v)
