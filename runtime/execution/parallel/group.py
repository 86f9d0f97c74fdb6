"""The process group of a tensor parallel model."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.errors import ModelError

_HOST = "127.0.0.1"
# Applies to collectives within a step and during the start. Between steps, no rank waits in a collective.
_TIMEOUT = timedelta(minutes=5)


def rank_device(device: torch.device, rank: int, size: int) -> torch.device:
    """The device of a rank. `device`: that of rank 0. Raises ModelError if there are too few GPUs."""
    if device.type == "cpu":
        return device
    first, available = device.index or 0, torch.cuda.device_count()
    if first + size > available:
        raise ModelError(f"--tensor-parallel is {size} from {device} on, but torch finds {available} CUDA devices")
    return torch.device("cuda", first + rank)


def loopback() -> str | None:
    """The name of the interface that reaches only this machine: `lo`, on macOS `lo0`."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


class RankGroup:
    """Collectives among the ranks: gloo between CPUs, NCCL between GPUs.

    Attributes:
        rank: the rank of this process; 0 is the driver.
        size: number of ranks.
        device: the device of this rank.
    """

    def __init__(self, store: dist.TCPStore, rank: int, size: int, device: torch.device):
        """Join the group through `store`. Blocks until all ranks have joined."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # All ranks are on this machine, whatever its host name resolves to.
        if (name := loopback()) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
        self.rank, self.size, self.device = rank, size, device

    @staticmethod
    def open_store(size: int) -> dist.TCPStore:
        """Open the driver's store on a free port. Raises ModelError if this process already is in a group."""
        if dist.is_initialized():
            raise ModelError("--tensor-parallel: this process is in a process group of torch.distributed already")
        return dist.TCPStore(_HOST, 0, size, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)

    @staticmethod
    def find_store(port: int, size: int) -> dist.TCPStore:
        """Connect another rank to the driver's store."""
        return dist.TCPStore(_HOST, port, size, is_master=False, timeout=_TIMEOUT)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, in place."""
        dist.all_reduce(x)
        return x

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate all ranks' tensors [n, m] by columns, [n, size * m], in the order of ranks."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def least(self, value: int) -> int:
        """The minimum of all ranks' values."""
        least = torch.tensor(value)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def abort(self) -> None:
        """Abort a collective that waits for an ended rank. Only NCCL needs this; gloo fails by itself."""
        if self.device.type == "cuda" and dist.group.WORLD is not None:
            dist.group.WORLD.abort()

    def close(self) -> None:
        dist.destroy_process_group()

    @staticmethod
    def abandon() -> None:
        """Leave the group, if any, after a failed load, so that this process can load another model."""
        if dist.is_initialized():
            dist.destroy_process_group()
