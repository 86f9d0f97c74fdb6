"""The recurrent states of live requests."""

import math
from collections.abc import Sequence

import torch

from runtime.batch import MOST_DRAFTED
from runtime.kv.pool import zeros


class StatePool:
    """Recurrent states in slots, two for each live request; main memory is taken when a slot is first used.

    Attributes:
        tensors: for each shape of the layout, float32 [num_slots, *shape], contiguous.
        records: for each recurrent layer, float32 [num_slots, MOST_DRAFTED, size], what computing the rows of the
            latest draft again needs.
        state_bytes: bytes of one slot, without its records.
    """

    def __init__(
        self, layout: Sequence[tuple[int, ...]], num_slots: int, device: torch.device, records: Sequence[int] = ()
    ):
        """`records`: see `ModelSpec`."""
        self.num_slots = num_slots
        self.records = [zeros((num_slots, MOST_DRAFTED, size), torch.float32, device) for size in records]
        self.tensors = [zeros((num_slots, *shape), torch.float32, device) for shape in layout]
        self.state_bytes = sum(math.prod(shape) for shape in layout) * torch.float32.itemsize

    def clear(self, slot: int) -> None:
        """Set a slot to the state before the first token."""
        for tensor in self.tensors:
            tensor[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        for tensor in self.tensors:
            tensor[target] = tensor[source]

    def read(self, slot: int, size: int) -> torch.Tensor:
        """A copy of a slot, uint8 [size] on the device, with zeros behind the `state_bytes`."""
        parts = [tensor[slot].flatten().view(torch.uint8) for tensor in self.tensors]
        return torch.cat((*parts, parts[0].new_zeros(size - self.state_bytes)))

    def write(self, slot: int, data: torch.Tensor) -> None:
        """Fill a slot with bytes of `read`, which other bytes may follow."""
        whole, at = data[: self.state_bytes].view(torch.float32), 0
        for tensor in self.tensors:
            size = math.prod(tensor.shape[1:])
            tensor[slot] = whole[at : at + size].view(tensor.shape[1:])
            at += size
