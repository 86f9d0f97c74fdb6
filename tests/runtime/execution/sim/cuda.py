"""`torch.cuda` of the simulated device: streams, events, graphs and memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runtime.execution.sim.tensors import Device, Dispatch, Tape

COUNT = 2


class Cuda:
    """What the product calls of `torch.cuda`, bound to a device."""

    def __init__(self, device: Device):
        self._device = device

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace `torch.cuda` until the end of the test."""
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
        for name in ("current_device", "set_device", "current_stream", "synchronize", "device", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        for name, kind in (("Stream", Stream), ("Event", Event), ("CUDAGraph", Graph)):
            # Classes, because modules that are imported meanwhile name them in annotations.
            monkeypatch.setattr(torch.cuda, name, type(name, (kind,), {"_device": self._device}))
        fixed = {
            "is_available": True, "device_count": COUNT, "graph_pool_handle": (0, 0), "empty_cache": None,
            "mem_get_info": (7 << 30, 8 << 30), "get_device_capability": (9, 0), "get_device_name": "Simulated",
            "get_device_properties": SimpleNamespace(multi_processor_count=132, total_memory=8 << 30, name="Simulated"),
        }  # fmt: skip
        for name, value in fixed.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        monkeypatch.setattr(torch, "Generator", Generator)
        # A mode holds for one thread.
        run, simulated = threading.Thread.run, self._device

        def simulating(thread: threading.Thread) -> None:
            with torch.inference_mode(), Dispatch(simulated):
                run(thread)

        monkeypatch.setattr(threading.Thread, "run", simulating)

    def current_device(self) -> int:
        return self._device.current.device

    def set_device(self, device: Any) -> None:
        self._device.current.device = _index(device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def synchronize(self, device: Any = None) -> None:
        self._device.note("sync", "torch.cuda.synchronize")

    def current_stream(self, device: Any = None) -> "Stream":
        found = torch.cuda.Stream()
        found.cuda_stream = self._device.current.stream
        return found

    @contextmanager
    def stream(self, stream: "Stream | None") -> Iterator[None]:
        current, before = self._device.current, self._device.current.stream
        current.stream = before if stream is None else stream.cuda_stream
        try:
            yield
        finally:
            current.stream = before

    @contextmanager
    def graph(self, graph: "Graph", **_: Any) -> Iterator[None]:
        current = self._device.current
        current.tape = graph.tape
        try:
            yield
        finally:
            current.tape = None


class Stream:
    """A stream; its work is done at once."""

    _device: Device
    _numbers = count(1)

    def __init__(self, *_: Any, **__: Any):
        self.cuda_stream = next(self._numbers)

    def wait_stream(self, other: "Stream") -> None:
        pass

    def wait_event(self, event: "Event") -> None:
        pass

    def synchronize(self) -> None:
        self._device.note("sync", "Stream.synchronize")


class Event:
    """An event of a stream, which the device has always reached."""

    _device: Device

    def __init__(self, **_: Any):
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._device.note("wait", "Event.synchronize")


class Graph:
    """A captured graph."""

    _device: Device

    def __init__(self) -> None:
        self.tape = Tape()

    def replay(self) -> None:
        self._device.note("launch", f"a graph of {len(self.tape)} kernels")
        self.tape.replay()


class Generator(torch.Generator):
    """Random numbers, which are those of the host on every device."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu"):
        self._on = torch.device(device)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._on


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0
