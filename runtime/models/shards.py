"""Shards of a model for tensor parallelism, as in Megatron: q, k, v, gate, up by outputs; o and down by inputs."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from runtime.errors import ModelError
from runtime.models.spec import DecoderSpec

# The sharded dimension of a stored weight [out, in].
_CUT = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}


def split_spec(spec: DecoderSpec, size: int) -> DecoderSpec:
    """The spec of one of `size` equal ranks.

    Raises ModelError for experts, Gemma, recurrent layers, latent attention, and shapes that do not divide.
    """
    is_whole = spec.experts is not None or spec.norms_outputs or bool(spec.recurrent) or spec.latent is not None
    if is_whole and size > 1:
        raise ModelError(f"--tensor-parallel is {size}; the layers of {spec.architecture} are served by one rank")
    sizes = {
        "query heads": spec.num_heads,
        "key-value heads": spec.num_kv_heads,
        "inner columns": spec.intermediate_size,
    }
    if uneven := [f"{number} {what}" for what, number in sizes.items() if number % size]:
        raise ModelError(f"--tensor-parallel is {size}, which does not divide the model's {' and '.join(uneven)}")
    return replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=spec.num_kv_heads // size,
        intermediate_size=spec.intermediate_size // size,
    )


def share_of(name: str, size: int) -> int:
    """Number of shards into which a tensor is cut; 1: every rank has the whole tensor."""
    return size if name == "lm_head.weight" or name.split(".")[-2] in _CUT else 1


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's shard of the weights."""

    rank: int
    size: int

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a tensor; the whole tensor if every rank needs it.

        The head is sharded over the vocabulary and padded with zeros. The biases of o and down are added to a sum over
        ranks, so only the first rank has them; the other ranks get zeros.
        """
        if name == "lm_head.weight":
            return self.head(tensor)
        module, kind = name.split(".")[-2:]
        dimension = _CUT.get(module)
        if dimension is None:
            return tensor
        if dimension == 1 and kind == "bias":
            return tensor if self.rank == 0 else torch.zeros_like(tensor)
        return tensor.chunk(self.size, dim=dimension)[self.rank]

    def head(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the head [vocab, hidden], padded with zeros to the same number on all ranks."""
        count = -(-len(whole) // self.size)
        rows = whole[self.rank * count : (self.rank + 1) * count]
        return F.pad(rows, (0, 0, 0, count - len(rows)))
