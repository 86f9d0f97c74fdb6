"""PIE (positional integrity encoding, He et al. 2024): rows of documents are moved to their place, and none changes."""

from __future__ import annotations

import numpy as np

from runtime.reuse.fusion.looks import Look
from runtime.reuse.fusion.methods.method import Method


class Pie(Method):
    """Own rows alone are computed."""

    name = "pie"

    def choose(self, look: Look | None) -> np.ndarray:
        return self.layout.candidates[:0]
