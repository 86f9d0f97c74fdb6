"""Weights that stay quantised on a GPU: torch's products with 4-bit tiles and with float8."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from runtime.execution.device import is_lost
from runtime.models.coded import CodedWeight

log = logging.getLogger(__name__)

_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
# Columns that may share a scale of the 4-bit product, and tiles of 16 columns that its layout may join.
_GROUPS, _TILES = (256, 128, 64, 32), (8, 4, 2)
# Rows of a weight that are tried.
_TRIED = 1024


class CodedTensor(torch.Tensor):
    """A weight [n, k], bfloat16 for whom asks, of which only the product `F.linear` exists.

    `tolerance`: relative error of a product that is right.
    """

    tolerance: float
    is_quantized = True

    @staticmethod
    def __new__(cls, weight: CodedWeight) -> "CodedTensor":
        made: CodedTensor = torch.Tensor._make_wrapper_subclass(
            cls, weight.codes.shape, dtype=torch.bfloat16, device=weight.codes.device
        )
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        return _linear(*args, **kwargs) if func is F.linear else super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of a quantised weight")

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight^T of bfloat16 [m, k]."""
        raise NotImplementedError


def _linear(x: torch.Tensor, weight: CodedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = weight.product(x)
    return out if bias is None else out + bias


class Int4Tensor(CodedTensor):
    """Codes of 4 bits in torch's tiles. Scales, and zeros times scales, are rounded to bfloat16."""

    tolerance = 0.02

    def __init__(self, weight: CodedWeight):
        """`weight` has blocks of one row; n is a multiple of 16, k of 32. Raises RuntimeError."""
        codes = weight.codes
        k = codes.shape[1]
        tiles = next(tiles for tiles in _TILES if k % (16 * tiles) == 0)
        self._is_cpu = codes.device.type == "cpu"
        if self._is_cpu:
            self._tiles = torch._convert_weight_to_int4pack_for_cpu(codes.int(), tiles)
        else:
            even, odd = codes.unflatten(1, (-1, 2)).unbind(2)
            self._tiles = torch._convert_weight_to_int4pack(even << 4 | odd, tiles)
        assert weight.zeros is not None
        self._group = next(size for size in _GROUPS if weight.blocks[1] % size == 0 and k % size == 0)
        scales, zeros = weight.scales.float().t(), weight.zeros.t()
        # The product reads scale * (code - 8) + offset, [groups, n, 2].
        both = torch.stack((scales, scales * (8 - zeros)), dim=-1).bfloat16()
        self._scales = both.repeat_interleave(weight.blocks[1] // self._group, dim=0).narrow(0, 0, k // self._group)

    @classmethod
    def takes(cls, weight: CodedWeight) -> bool:
        (n, k), group = weight.codes.shape, weight.blocks[1]
        is_known = weight.bits == 4 and weight.zeros is not None and weight.order is None
        return is_known and not n % 16 and not k % 32 and not group % 32

    def product(self, x: torch.Tensor) -> torch.Tensor:
        product = torch._weight_int4pack_mm_for_cpu if self._is_cpu else torch._weight_int4pack_mm
        return product(x.contiguous(), self._tiles, self._group, self._scales)


class Float8Tensor(CodedTensor):
    """float8 with a scale for each row. Rows of activations are rounded to float8, with a scale each."""

    tolerance = 0.06

    def __init__(self, weight: CodedWeight):
        """`weight` has blocks of one row; n and k are multiples of 16."""
        self._codes, self._scales = weight.codes, weight.scales.float().t().contiguous()

    @classmethod
    def takes(cls, weight: CodedWeight) -> bool:
        n, k = weight.codes.shape
        return weight.zeros is None and weight.scales.shape[1] == 1 and not n % 16 and not k % 16

    def product(self, x: torch.Tensor) -> torch.Tensor:
        scales = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / _LARGEST
        rounded = (x / scales).to(_FLOAT8)
        return torch._scaled_mm(rounded, self._codes.t(), scales, self._scales, out_dtype=x.dtype)


def coded_tensor(weight: CodedWeight, device: torch.device, told: set[type[CodedTensor]]) -> CodedTensor | None:
    """The weight on a device; None: there is no product for it, or it does not give what the unpacked weight gives.

    Each weight is tried with a few random rows, because layouts depend on the GPU and the version of torch. A product
    that fails its trial is logged, unless another one of its kind is in `told`.

    Raises:
        RuntimeError: if the device is lost.
    """
    kinds: tuple[type[Int4Tensor | Float8Tensor], ...] = Int4Tensor, Float8Tensor
    kind = next((kind for kind in kinds if kind.takes(weight)), None)
    if kind is None:
        return None
    n, k = weight.codes.shape
    try:
        weight = weight.to(device)
        found = kind(weight)
        x = torch.randn(17, k, generator=torch.Generator().manual_seed(n)).to(device, torch.bfloat16)
        tried = np.arange(0, n, -(-n // _TRIED))
        wanted = F.linear(x.float(), weight.rows(tried).values())
        error = float((found.product(x)[:, tried].float() - wanted).norm() / wanted.norm())
    except RuntimeError as reason:
        if is_lost(device):
            raise
        _warn(n, k, kind, str(reason).splitlines()[0], told)
        return None
    if not error < kind.tolerance:
        _warn(n, k, kind, f"its product is off by {100 * error:.0f} %", told)
        return None
    return found


def _warn(n: int, k: int, kind: type[CodedTensor], why: str, told: set[type[CodedTensor]]) -> None:
    if kind not in told:
        log.warning("a weight of %d x %d is unpacked, as others like it may be: %s", n, k, why)
        told.add(kind)
