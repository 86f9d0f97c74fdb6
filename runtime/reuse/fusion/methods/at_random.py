"""The control: as many rows as the others take, chosen at random."""

from __future__ import annotations

import hashlib

import numpy as np

from runtime.reuse.fusion.looks import DenseLook, Look
from runtime.reuse.fusion.methods.method import Ranked


class AtRandom(Ranked):
    """Every prompt has a choice of its own, the same each time."""

    name = "random"
    look = DenseLook

    def order(self, runs: np.ndarray, look: Look | None) -> np.ndarray:
        digest = hashlib.blake2b(self.layout.prompt.tobytes(), digest_size=16).digest()
        seed = int.from_bytes(digest[:8], "little")
        return np.random.Generator(np.random.PCG64(seed)).permutation(int(runs.max()) + 1 if len(runs) else 0)
