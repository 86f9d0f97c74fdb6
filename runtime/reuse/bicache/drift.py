"""Drift of a prompt's rows: when a prefix is refreshed (after Elastic-Cache, Nguyen-Tri et al., 2025)."""

from __future__ import annotations

import numpy as np
import torch

from runtime.kv.pool import KVPool


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
