"""Transfers of pages between a GPU and main memory, beside the steps."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class SideStream:
    """A stream beside the one that computes, so that steps do not wait for transfers. It does nothing on a CPU."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def behind_steps(self) -> Iterator[None]:
        """A context for work behind all steps that were launched so far; for any thread. Its end waits for the work."""
        if self._stream is None:
            yield
            return
        # The current device and its stream are settings of each thread.
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            with torch.cuda.stream(self._stream):
                yield
            done = torch.cuda.Event()
            done.record(self._stream)
            done.synchronize()

    def download(self, data: torch.Tensor) -> np.ndarray:
        """A copy of a tensor of the device in main memory, flat; on a CPU, the tensor itself."""
        if self._stream is None:
            return data.flatten().numpy()
        with self.behind_steps():
            pinned = torch.empty(data.shape, dtype=data.dtype, pin_memory=True).copy_(data, non_blocking=True)
        # Pinned memory is used again, as to pin takes long; the copy may be kept.
        return pinned.flatten().numpy().copy()
