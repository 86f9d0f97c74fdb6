"""The processes that compute one model together."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.errors import ModelError

_HOST = "127.0.0.1"
# Ranks meet within a step and while they start; between steps nobody waits in a collective.
_TIMEOUT = timedelta(minutes=5)


def rank_device(device: torch.device, rank: int, size: int) -> torch.device:
    """Where a rank computes if the first one does on `device`. Raises ModelError if there are too few GPUs."""
    if device.type == "cpu":
        return device
    first, available = device.index or 0, torch.cuda.device_count()
    if first + size > available:
        raise ModelError(f"--tensor-parallel is {size} from {device} on, but torch finds {available} CUDA devices")
    return torch.device("cuda", first + rank)


class Group:
    """Collectives among the ranks: gloo between CPUs, NCCL between GPUs.

    Attributes:
        rank: this process; 0 is the driver, which schedules.
        size: processes.
        device: where this rank computes.
    """

    def __init__(self, store: dist.TCPStore, rank: int, size: int, device: torch.device):
        """Meet the other ranks at `store`; blocks until all are there. Raises ModelError."""
        if dist.is_initialized():
            raise ModelError("--tensor-parallel: this process is in a process group of torch.distributed already")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # All ranks are on this machine, whatever its host name resolves to.
        if any(name == "lo" for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
        self.rank, self.size, self.device = rank, size, device

    @staticmethod
    def open_store(size: int) -> dist.TCPStore:
        """The driver's meeting place, on a free port."""
        return dist.TCPStore(_HOST, 0, size, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)

    @staticmethod
    def find_store(port: int, size: int) -> dist.TCPStore:
        """The driver's meeting place, seen from another rank."""
        return dist.TCPStore(_HOST, port, size, is_master=False, timeout=_TIMEOUT)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, in place."""
        dist.all_reduce(x)
        return x

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors [n, m], equal in shape, as [n, size * m]."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def least(self, value: int) -> int:
        """The least of all ranks' values."""
        least = torch.tensor(value)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def abort(self) -> None:
        """End a collective that waits for a rank that is gone; gloo's end by themselves."""
        if self.device.type == "cuda" and dist.group.WORLD is not None:
            dist.group.WORLD.abort()

    def close(self) -> None:
        """Leave; no collective may follow."""
        dist.destroy_process_group()
