"""FlashInfer's kernels on the simulated device: those of `stand_in`, which take what real ones take."""

from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.runtime.execution.attention import stand_in
from tests.runtime.execution.sim.tensors import Device, DeviceTensor, _here, kernels_only


class _OnDevice:
    """A wrapper of `stand_in`, planned with host tensors in pinned memory and run on the device's."""

    made: type

    def __init__(self, device: Device, workspace: torch.Tensor, **options: Any):
        _check(device, "a workspace", [workspace, *options.values()])
        self._device = device
        with kernels_only():
            self._wrapper = self.made(_here(workspace), **tree_map(_here, options))

    def plan(self, *given: Any, **options: Any) -> None:
        # Without `seq_lens`, a plan of prefill copies lengths that it computes in pageable memory.
        lengths = (options.get("seq_lens", torch.ones(1)),) if isinstance(self, _Prefill) else ()
        for tensor in (one for one in (*given, *lengths) if isinstance(one, torch.Tensor)):
            if not isinstance(tensor, DeviceTensor):  # FlashInfer copies it without waiting
                self._device.note("upload" if self._device.is_pinned(tensor) else "pageable", "a plan")
        _check(self._device, "plan", [value for name, value in options.items() if name != "seq_lens"])
        if options.get("custom_mask") is not None:  # FlashInfer packs it, and asks how large the result is
            self._device.note("pageable", "bounds of a mask")
            self._device.note("sync", "size of a packed mask")
        with kernels_only():
            self._wrapper.plan(*tree_map(_here, given), **tree_map(_here, options))

    def reset_workspace_buffer(self, *workspaces: torch.Tensor) -> None:
        _check(self._device, "workspaces", workspaces)
        with kernels_only():
            self._wrapper.reset_workspace_buffer(*map(_here, workspaces))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return _launch(self._device, self._wrapper.run, args, kwargs)


class _Prefill(_OnDevice):
    made = stand_in.BatchPrefillWithPagedKVCacheWrapper


class _Decode(_OnDevice):
    made = stand_in.BatchDecodeWithPagedKVCacheWrapper


def flashinfer_on(device: Device) -> ModuleType:
    """The package."""
    module, sampling = ModuleType("flashinfer"), ModuleType("flashinfer.sampling")
    module.__spec__ = ModuleSpec("flashinfer", None)
    found = stand_in.stand_in()
    for namespace, target in ((found, module), (found.sampling, sampling)):
        for name, function in vars(namespace).items():
            if callable(function) and not isinstance(function, type):
                setattr(target, name, partial(_launched, device, function))
    module.BatchPrefillWithPagedKVCacheWrapper = partial(_Prefill, device)  # type: ignore[attr-defined]
    module.BatchDecodeWithPagedKVCacheWrapper = partial(_Decode, device)  # type: ignore[attr-defined]
    module.sampling = sampling  # type: ignore[attr-defined]
    return module


def _launched(device: Device, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _launch(device, function, args, kwargs)


def _launch(device: Device, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _check(device, function.__name__, [*args, *kwargs.values()])

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with kernels_only():
            return function(*args, **kwargs)

    return device.launch(kernel, args, kwargs, device.current.device)


def _check(device: Device, name: str, given: Any) -> None:
    """Kernels start on the current device of the thread, and take nothing from elsewhere."""
    for tensor in (one for one in tree_leaves(list(given)) if isinstance(one, torch.Tensor)):
        if not isinstance(tensor, DeviceTensor):
            raise RuntimeError(f"flashinfer.{name}: a host tensor {tuple(tensor.shape)}")
        if tensor.device.index != device.current.device:
            raise RuntimeError(f"flashinfer.{name}: a tensor on {tensor.device}, launched on {device.current.device}")
