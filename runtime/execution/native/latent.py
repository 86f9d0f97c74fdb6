"""The weights of latent attention for the kernels."""

import torch

from runtime.execution.mixers.latent import LatentAttention
from runtime.execution.mixers.mixer import KVMixer
from runtime.execution.native import library as c
from runtime.execution.native.packed import PackedWeights, Team, describe, packed_bytes
from runtime.models.latent import LATENT_EPS


class PackedLatent:
    """The packed weights of one layer; `struct` is valid while this object exists.

    Products of each head keep the model's dtype, even beside codes.
    """

    def __init__(self, team: Team, mixer: KVMixer, hidden: int, bits: int):
        """Move the weights out of `mixer`. Raises MemoryError."""
        assert isinstance(mixer, LatentAttention)
        down = mixer.query_down if mixer.query_down is not None else mixer.query.new_empty(0, hidden)
        coded = {"query_down": down, "query": mixer.query, "row": mixer.row}
        heads = {"absorb": mixer.absorb, "expand": mixer.expand}
        described = [describe(weight, bits=bits) for weight in coded.values()]
        described += [describe(one) for weight in heads.values() for one in weight]
        self._weights = pack = PackedWeights(team, sum(packed_bytes(team.library, one) for one in described))
        matrices = {name: pack.add(weight, bits=bits) for name, weight in coded.items()}
        self._heads = {name: (c.Matrix * len(w))(*(pack.add(one) for one in w)) for name, w in heads.items()}
        spec, norm = mixer.spec, mixer.query_norm
        self.struct = c.LatentStruct(
            **matrices,
            **self._heads,
            query_norm=None if norm is None else pack.keep(norm.float()),
            row_norm=pack.keep(mixer.row_norm.float()),
            rank=spec.rank,
            plain=spec.plain,
            rotated=spec.rotated,
            value=spec.value,
            factor=spec.factor,
            eps=LATENT_EPS,
        )
        for name in ("query_down", "query", "row", "absorb", "expand"):
            setattr(mixer, name, torch.empty(0))
