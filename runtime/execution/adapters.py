"""Low-rank adapters of Ramet's own decoders, fused like the weights that they change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from runtime.batch import AdapterRows
from runtime.errors import ModelError

if TYPE_CHECKING:
    from runtime.models.adapters.lora import LoraAdapter, LowRank
    from runtime.models.spec import DecoderSpec

# Linear layers that are computed as one product, because they read the same input.
_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}

# The low-rank updates of an adapter: for each layer, by name of the product.
FusedAdapter = list[dict[str, "LowRank"]]


class Adapted(NamedTuple):
    """Rows `first` to `stop` (exclusive) of a layer group, and their adapter."""

    adapter: FusedAdapter
    first: int
    stop: int


def fuse(adapter: LoraAdapter, spec: DecoderSpec) -> FusedAdapter:
    """The fused updates of an adapter, float32. Raises ModelError if the adapter does not fit the model."""
    left, shapes = dict(adapter.factors), spec.expected_tensors()
    fused: FusedAdapter = [{} for _ in range(spec.num_layers)]
    for index, layer in enumerate(fused):
        for product, names in _FUSED.items():
            modules = [f"model.layers.{index}.{name}" for name in names]
            if f"{modules[0]}.weight" not in shapes:  # experts are there
                continue
            found = [left.pop(module, None) for module in modules]
            sizes = [shapes[f"{module}.weight"] for module in modules]
            for module, size, factor in zip(modules, sizes, found, strict=True):
                if factor is not None and (len(factor.b), factor.a.shape[1]) != size:
                    shape = [len(factor.b), factor.a.shape[1]]
                    raise ModelError(f"the adapter changes {module} of shape {shape}; the model's is {list(size)}")
            if any(factor is not None for factor in found):
                layer[product] = _side_by_side(found, [out for out, _ in sizes])
    if left:
        what = "which no adapter may change" if f"{min(left)}.weight" in shapes else "which is no linear layer"
        raise ModelError(f"the adapter changes {min(left)}, {what} of {spec.architecture}")
    return fused


def _side_by_side(factors: Sequence[LowRank | None], sizes: Sequence[int]) -> LowRank:
    """One update for several products that are fused side by side; `sizes`: their columns."""
    from runtime.models.adapters.lora import LowRank

    present = [factor for factor in factors if factor is not None]
    a = torch.cat([factor.a for factor in present])
    b = torch.zeros(sum(sizes), len(a))
    row = column = 0
    for factor, size in zip(factors, sizes, strict=True):
        if factor is not None:
            b[row : row + size, column : column + len(factor.a)] = factor.b
            column += len(factor.a)
        row += size
    return LowRank(a, b)


def rows_within(adapters: Sequence[AdapterRows], alive: torch.Tensor | None) -> list[AdapterRows]:
    """Convert row ranges of a step into row ranges of a layer group; `alive`: see `LayerGroup.rows`."""
    if alive is None or not adapters:
        return list(adapters)
    edges = torch.tensor([[rows.first, rows.stop] for rows in adapters])
    found = zip(adapters, torch.searchsorted(alive, edges).tolist(), strict=True)
    return [AdapterRows(rows.digest, *within) for rows, within in found if within[0] < within[1]]


def add(adapted: Sequence[Adapted], layer: int, product: str, out: torch.Tensor, x: torch.Tensor) -> None:
    """Add the adapters' updates for rows x [n, in] to a layer's product `out` [n, out], in place."""
    for one in adapted:
        if (low_rank := one.adapter[layer].get(product)) is not None:
            low_rank.add(out[one.first : one.stop], x[one.first : one.stop])
