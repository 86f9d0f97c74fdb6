"""Tensors on a simulated device: their data are in main memory, and they say that they are on `cuda`.

Operations behave as on a GPU in what they demand of their operands, and tell `Device` what they cost.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.runtime.execution.sim.events import Recorder

aten = torch.ops.aten
_CPU = torch.device("cpu")

# The host reads a value, or the size of the result.
_SYNCS = {
    aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default,
    aten.masked_select.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
    aten.bincount.default, aten.repeat_interleave.Tensor, aten.multinomial.default,
}  # fmt: skip
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_PINS = {aten._pin_memory.default, aten.pin_memory.default}
# The caching allocator's units, in bytes.
_BLOCK, _SEGMENT = 512, 2 << 20


class Tape(list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]]):
    """The kernels of a capture, with their operands and results in main memory."""

    @torch.inference_mode()
    def replay(self) -> None:
        """Run all kernels again. Their results go where those of the capture went."""
        for kernel, args, kwargs, results in self:
            again = tree_leaves(kernel(*args, **kwargs))
            for old, new in zip(tree_leaves(results), again, strict=True):
                if isinstance(old, torch.Tensor) and _address(old) != _address(new):
                    old.copy_(new)


class Memory:
    """The memory of the device, as torch's allocator reserves it: what is freed is used again, and none is given back.

    Attributes:
        reserved: bytes.
    """

    def __init__(self) -> None:
        self.reserved = self._used = 0
        self._held: dict[int, weakref.finalize] = {}

    def hold(self, tensor: torch.Tensor) -> bool:
        """Count a tensor's storage until it is freed; returns whether more memory had to be reserved."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), -(-storage.nbytes() // _BLOCK) * _BLOCK
        if not size or address in self._held:
            return False
        self._held[address] = weakref.finalize(storage, self._free, address, size)
        self._used += size
        if self._used <= self.reserved:
            return False
        self.reserved = -(-self._used // _SEGMENT) * _SEGMENT
        return True

    def _free(self, address: int, size: int) -> None:
        del self._held[address]
        self._used -= size


class _OfThread(threading.local):
    """What CUDA keeps for each thread: the current device and its stream, and a capture."""

    device = stream = 0
    tape: Tape | None = None


class Device:
    """The simulated devices `cuda:0` and `cuda:1`, which share one account.

    Attributes:
        recorder: gets the events.
        current: see `_OfThread`.
    """

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.memory = Memory()
        self.current = _OfThread()
        self._pinned: dict[int, weakref.finalize] = {}
        self.watch = self.recorder.watch

    def note(self, kind: str, what: str) -> None:
        """Tell of an event. Raises RuntimeError within a capture."""
        if self.current.tape is not None and kind != "reserve":
            raise RuntimeError(f"operation not permitted when stream is capturing: {kind}, {what}")
        self.recorder.note(kind, what, self.current.stream)

    # -- host memory -----------------------------------------------------------------------------------------

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.note("pin", f"{tensor.nbytes} bytes")
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        self._pinned[address] = weakref.finalize(storage, self._pinned.pop, address, None)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return not tensor.numel() or _address(tensor) in self._pinned

    # -- kernels ---------------------------------------------------------------------------------------------

    def launch(self, kernel: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], index: int) -> Any:
        """Run a kernel on device `index` over the data of its operands; what it returns is on the device."""
        operands = {id(t.data_here): t for t in tree_leaves((args, kwargs)) if isinstance(t, DeviceTensor)}
        args, kwargs = tree_map(_here, (tuple(args), kwargs))
        results = kernel(*args, **kwargs)
        if self.current.tape is not None:
            self.current.tape.append((kernel, args, kwargs, results))

        def there(one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            operand = operands.get(id(one))
            return self.place(one, index) if operand is None else operand

        return tree_map(there, results)

    def place(self, data: torch.Tensor, index: int) -> DeviceTensor:
        """A tensor on device `index` with these data."""
        if self.memory.hold(data):
            self.note("reserve", f"{self.memory.reserved >> 20} MiB in all")
        return DeviceTensor(data, self, index)

    def index(self, device: torch.device) -> int:
        return self.current.device if device.index is None else device.index


class DeviceTensor(torch.Tensor):
    """A tensor on a simulated device. `data_here`: its data in main memory."""

    data_here: torch.Tensor
    simulated: Device
    _index: int

    @staticmethod
    def __new__(cls, data: torch.Tensor, simulated: Device, index: int) -> DeviceTensor:
        # For torch's own code it is on `meta`, as fake tensors are: this torch may know no other device.
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype,
            device=torch.device("meta"),
        )  # fmt: skip
        made.data_here, made.simulated, made._index = data, simulated, index
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self._index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        (simulated, *_) = [t.simulated for t in tree_leaves((args, kwargs)) if isinstance(t, DeviceTensor)]
        return Dispatch(simulated).run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"{self.data_here!r} on {self.device}"

    def tolist(self) -> Any:
        self.simulated.note("sync", "tolist")
        return self.data_here.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {self.device} tensor to numpy")

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.data_here.data_ptr()

    def is_pinned(self, *_: Any) -> bool:
        return False

    def pin_memory(self, *_: Any) -> torch.Tensor:
        raise RuntimeError(f"cannot pin a tensor on {self.device}")

    def record_stream(self, stream: Any) -> None:
        """The data of a tensor are freed with it, in whatever stream."""


class Dispatch(TorchDispatchMode):
    """Runs the operations of a thread, those on the host included."""

    def __init__(self, device: Device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (aten.to.device, aten.to.dtype_layout):
            names = [one.name for one in func._schema.arguments[1:]]
            return self._to(args[0], **dict(zip(names, args[1:], strict=False)), **kwargs)
        if func is not aten.pin_memory.default and func._can_decompose():
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        leaves = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        there = [one for one in leaves if isinstance(one, DeviceTensor)]
        if func is aten._to_copy.default:
            return self._move(args[0], kwargs)
        if func is aten.copy_.default and len(there) < 2 and there:
            return self._copy(*args, **kwargs)
        if not there:
            return self._on_host(func, args, kwargs, leaves)
        self._check(func, args, there, [one for one in leaves if not isinstance(one, DeviceTensor)])
        if func in _SYNCS:
            self._device.note("sync", _name(func))
            if func in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default):
                return func(*tree_map(_here, args), **tree_map(_here, kwargs))
        if (device := kwargs.get("device")) is not None:
            if device.type == "cpu":  # a new host tensor like one on the device
                given = kwargs | {"pin_memory": False}
                result = func(*tree_map(_here, args), **given)
                return self._device.pin(result) if kwargs.get("pin_memory") else result
            kwargs = {**kwargs, "device": _CPU}
        return self._device.launch(func, args, kwargs, there[0].device.index)

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[torch.Tensor]) -> Any:
        """An operation without operands on the device, which may make a tensor there."""
        device = kwargs.get("device")
        if device is not None and device.type in ("cuda", "meta"):  # torch's own code has read `meta` from a tensor
            if any(one.dim() for one in operands):
                raise RuntimeError(f"{_name(func)}: host operands for a result on {device}")
            kwargs = {**kwargs, "device": _CPU, "pin_memory": False}
            return self._device.launch(func, args, kwargs, self._device.index(device))
        if func in _PINS:
            return self._device.pin(args[0].clone())
        if func is aten.is_pinned.default:
            return self._device.is_pinned(args[0])
        if kwargs.get("pin_memory"):
            given = kwargs | {"pin_memory": False}
            return self._device.pin(func(*args, **given))
        return func(*args, **kwargs)

    def _check(self, func: Any, args: tuple[Any, ...], there: list[DeviceTensor], here: list[torch.Tensor]) -> None:
        """Raise RuntimeError for operands on several devices, except where CUDA takes a single number of the host."""
        if len({one.device for one in there}) > 1 and func is not aten.copy_.default:
            raise RuntimeError(f"{_name(func)}: operands on {there[0].device} and another device")
        if func in _INDEXING:
            index = [one for one in args[1] if one is not None]
            if hosts := [one for one in index if not isinstance(one, DeviceTensor)]:
                self._device.note("sync", f"{_name(func)} by {len(hosts)} index on the host")
            # A mask with one value is filled without counting.
            fills = func is not aten.index.Tensor and args[2].numel() == 1
            if not fills and any(one.dtype in (torch.bool, torch.uint8) for one in index):
                self._device.note("sync", f"{_name(func)} by a mask")
            here = [one for one in here if not any(one is other for other in hosts)]
        if shapes := [tuple(one.shape) for one in here if one.dim()]:
            raise RuntimeError(f"{_name(func)}: expected all tensors on one device, but got {shapes} on the host")

    def _to(self, source: torch.Tensor, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        """`to` with a device, for which torch's own code would look."""
        there, here = kwargs.get("device") or source.device, source.device
        same = there.type == here.type and (there.type == "cpu" or self._device.index(there) == here.index)
        if same and kwargs.get("dtype") in (None, source.dtype) and not copy:
            return source
        return self._move(source, kwargs)

    def _move(self, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """`_to_copy`: to another device or another dtype."""
        device = kwargs.get("device") or source.device
        waits = not kwargs.get("non_blocking", False)
        kept = {name: value for name, value in kwargs.items() if name in ("dtype", "layout", "memory_format")}
        if device.type == "cpu":
            result = aten._to_copy.default(_here(source), **kept)
            if isinstance(source, DeviceTensor):
                self._device.note("sync" if waits else "download", f"{source.nbytes} bytes to the host")
            return result
        if not isinstance(source, DeviceTensor):
            self._upload(source, waits)
        return self._device.launch(_cast, (source,), kept, self._device.index(device))

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """`copy_` between host and device."""
        if isinstance(target, DeviceTensor):
            self._upload(source, not non_blocking)
        elif non_blocking and self._device.is_pinned(target):
            self._device.note("download", f"{source.nbytes} bytes")
        else:
            self._device.note("sync", f"{source.nbytes} bytes to the host")
        _here(target).copy_(_here(source))
        return target

    def _upload(self, source: torch.Tensor, waits: bool) -> None:
        kind = "pageable" if not self._device.is_pinned(source) else "sync" if waits else "upload"
        self._device.note(kind, f"{source.nbytes} bytes to the device")


@contextmanager
def kernels_only() -> Iterator[None]:
    """A context without simulation, for kernels that are written in torch."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield


def _cast(source: torch.Tensor, **kept: Any) -> torch.Tensor:
    """`_to_copy`; to float8 as before torch 2.12: what is outside of the range becomes NaN."""
    if (dtype := kept.get("dtype")) is not None and dtype.itemsize == 1 and dtype.is_floating_point:
        source = source.masked_fill(source.abs() > torch.finfo(dtype).max, torch.nan)
    return aten._to_copy.default(source, **kept)


def _name(func: Any) -> str:
    return str(func).removeprefix("aten.")


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _here(one: Any) -> Any:
    return one.data_here if isinstance(one, DeviceTensor) else one
