"""The way of a step's small arrays to the device, without waiting for what runs there."""

from __future__ import annotations

import torch


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on `device`; on a GPU through pinned memory, in the order of its stream."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return pin(tensor, device).to(device, non_blocking=True)


def pin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor that others may bring to `device` without waiting."""
    return tensor.pin_memory() if device.type == "cuda" else tensor
