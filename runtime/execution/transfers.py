"""Transfers of small arrays to the device and back that do not wait for running kernels."""

from collections.abc import Sequence

import torch


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to `device`. A copy to a GPU goes through pinned memory and is ordered by the stream."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return pin(tensor, device).to(device, non_blocking=True)


def index_on(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [n] on `device`."""
    return upload(torch.tensor(values, dtype=torch.int64), device)


def pin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor, in pinned memory if `device` is a GPU, so that a transfer need not wait."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


class Mark:
    """An event in the current stream of a device; has no effect on a CPU."""

    def __init__(self, device: torch.device):
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Place the event after all work launched so far."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Block until the device has reached the event. Returns at once if it was never set."""
        if self._event is not None:
            self._event.synchronize()


class Download:
    """A transfer of tensors to the host, through pinned memory and ordered by the stream."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device):
        """Start the transfer of `tensors` on `device`. Later work on a GPU may overwrite them."""
        if device.type == "cuda":
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
        else:
            self._host = list(tensors)
        self._mark = Mark(device)
        self._mark.set()

    def wait(self) -> list[torch.Tensor]:
        """Wait for the transfer and return the tensors on the host. Raises CUDA errors of earlier kernels."""
        self._mark.wait()
        return self._host
