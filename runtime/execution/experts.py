"""Mixtures of experts in torch: a router chooses experts for each row, and their outputs are summed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from runtime.execution.ops import Ops
from runtime.models.experts import ExpertSpec
from runtime.models.mxfp4 import PackedExperts, unpack

# Most rows of a step on a GPU for which all experts compute all rows, if torch has no kernel for groups of rows.
MOST_DENSE_ROWS = 64


@dataclass(slots=True)
class Experts:
    """The experts of one layer, on one device.

    Attributes:
        router: float32 [count, hidden].
        gate_up: [count, 2 * inner, hidden], the rows of gate before the rows of up; packed only for the kernels.
        down: [count, hidden, inner], likewise.
        bias: float32 [count], added to the scores only for the choice of experts.
        router_bias: float32 [count].
        gate_up_bias, down_bias: [count, 2 * inner] and [count, hidden].
    """

    spec: ExpertSpec
    ops: Ops
    router: torch.Tensor
    gate_up: torch.Tensor | PackedExperts
    down: torch.Tensor | PackedExperts
    bias: torch.Tensor | None = None
    router_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen experts of rows [T, hidden], int64 [T, chosen], and their weights, float32 [T, chosen]."""
        spec = self.spec
        scores = self._scores(x)
        scores = scores.sigmoid() if spec.sigmoid else scores.softmax(-1)
        ranks = scores if self.bias is None else scores + self.bias
        if spec.groups > 1:
            grouped = ranks.unflatten(1, (spec.groups, -1))
            best = grouped.topk(min(spec.best, grouped.shape[-1])).values.sum(-1)
            hidden = torch.ones_like(best, dtype=torch.bool)
            hidden.scatter_(1, best.topk(spec.chosen_groups).indices, False)
            ranks = grouped.masked_fill(hidden[..., None], -torch.inf).flatten(1)
        experts = ranks.topk(spec.chosen).indices
        weights = scores.gather(1, experts)
        if spec.normalized:
            # The sum is 0 if all sigmoids underflow.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * spec.scale

    @property
    def most_free_rows(self) -> float:
        """Most rows on a GPU for which nothing waits for the host, so that a CUDA graph can hold the computation."""
        return math.inf if self._has_kernel else MOST_DENSE_ROWS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each row's experts, [T, hidden]. Sums in float32."""
        experts, weights = self.choose(x)
        is_dense = x.is_cuda and not self._has_kernel and len(x) <= MOST_DENSE_ROWS
        out = self._dense(x, experts) if is_dense else self._by_group(x, experts)
        return torch.matmul(weights[:, None], out.float())[:, 0].to(x.dtype)

    @property
    def _has_kernel(self) -> bool:
        return all(_is_grouped(weight) for weight in (self.gate_up, self.down))

    def _scores(self, x: torch.Tensor) -> torch.Tensor:
        """The router's scores, float32 [n, count]."""
        return F.linear(x.float(), self.router, self.router_bias)

    def _by_group(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The outputs [T, chosen, hidden] of each row's experts; an expert's rows are computed together."""
        sorted_experts, order = experts.flatten().sort()
        every = torch.arange(self.spec.count, device=x.device)
        counted = torch.searchsorted(sorted_experts, every, right=True, out_int32=True)
        ends = counted if self._has_kernel else counted.tolist()
        out = x[order // self.spec.chosen]
        out = self._gated(_product(out, self.gate_up, ends, self.gate_up_bias, sorted_experts))
        out = _product(out, self.down, ends, self.down_bias, sorted_experts)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return out[places].unflatten(0, experts.shape)

    def _dense(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See `_by_group`; every expert computes every row.

        A few rows need most experts anyway, and a GPU computes them while it reads the weights.
        """
        assert isinstance(self.gate_up, torch.Tensor)
        assert isinstance(self.down, torch.Tensor)
        out = torch.matmul(x, self.gate_up.transpose(1, 2))
        if self.gate_up_bias is not None:
            out += self.gate_up_bias[:, None]
        out = self._gated(out.flatten(0, 1)).unflatten(0, out.shape[:2])
        out = torch.matmul(out, self.down.transpose(1, 2))
        if self.down_bias is not None:
            out += self.down_bias[:, None]
        return out[experts, torch.arange(len(x), device=x.device)[:, None]]

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        limit = self.spec.limit
        if limit is None:
            return self.ops.silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * (gate * self.spec.alpha).sigmoid() * (up + 1)


def _is_grouped(weight: torch.Tensor | PackedExperts) -> bool:
    """Whether torch multiplies groups of rows [n, in] with their experts' weights [count, out, in] in one operation.

    Since torch 2.10, if rows of a weight are multiples of 16 bytes. On GPUs other than of compute capability 9 and 10
    (Hopper, B200), and with float32, that operation copies the counts of rows to the host, and no graph can hold it.
    """
    assert isinstance(weight, torch.Tensor)
    is_aligned = weight.stride(1) * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
    if not is_aligned or not hasattr(F, "grouped_mm"):
        return False
    if weight.is_cuda:
        return weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.device)[0] in (9, 10)
    return True


def _product(
    x: torch.Tensor,
    weight: torch.Tensor | PackedExperts,
    ends: torch.Tensor | list[int],
    bias: torch.Tensor | None,
    experts: torch.Tensor,
) -> torch.Tensor:
    """The products [n, out] of rows [n, in], sorted by expert, with weights [count, out, in].

    Args:
        ends: int32 [count], the row behind the last one of each expert; a list if `_is_grouped` is false for `weight`.
        experts: int64 [n], the expert of each row, for biases [count, out].
    """
    assert isinstance(weight, torch.Tensor)
    if isinstance(ends, torch.Tensor):
        out = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    else:
        parts = x.tensor_split(ends[:-1])
        out = torch.cat([F.linear(part, one) for part, one in zip(parts, weight, strict=True)])
    return out if bias is None else out + bias[experts]


def take_fused(
    weights: dict[str, torch.Tensor], mlp: str, spec: ExpertSpec, like: torch.Tensor, ops: Ops, keeps_codes: bool
) -> Experts:
    """The experts of a gpt-oss layer, whose tensor names begin with `mlp`.

    Args:
        like: any weight of the model; sets dtype and device.
        keeps_codes: whether MXFP4 stays packed.
    """

    def take(name: str) -> torch.Tensor:
        return weights.pop(mlp + name).to(like.device)

    def parted(by_turns: torch.Tensor) -> torch.Tensor:
        return torch.cat((by_turns[:, ::2], by_turns[:, 1::2]), dim=1)

    def product(name: str, order: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | PackedExperts:
        """[count, out, in], with the outputs in this order."""
        name = f"experts.{name}_proj"
        if (blocks := weights.pop(f"{mlp}{name}_blocks", None)) is None:
            return order(weights.pop(mlp + name).transpose(1, 2)).contiguous().to(like.device)
        packed = PackedExperts(order(blocks), order(weights.pop(f"{mlp}{name}_scales")))
        return packed if keeps_codes else unpack(*packed, like.dtype).to(like.device)

    return Experts(
        spec,
        ops,
        take("router.weight").float(),
        product("gate_up", parted),
        product("down", lambda weight: weight),
        router_bias=take("router.bias").float(),
        gate_up_bias=parted(take("experts.gate_up_proj_bias")),
        down_bias=take("experts.down_proj_bias"),
    )
