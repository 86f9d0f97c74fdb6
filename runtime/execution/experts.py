"""Mixtures of experts in torch: a router chooses experts for each row, and their outputs are summed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from runtime.execution.ops import Ops
from runtime.models.experts import ExpertSpec
from runtime.models.mxfp4 import PackedExperts, unpack


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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each row's experts, [T, hidden]. Sums in float32; computes one expert after the other."""
        experts, weights = self.choose(x)
        order = experts.flatten().argsort()
        rows, weights = order // self.spec.chosen, weights.flatten()[order, None]
        total, start = torch.zeros_like(x, dtype=torch.float32), 0
        for expert, count in enumerate(experts.flatten().bincount(minlength=self.spec.count).tolist()):
            if not count:
                continue
            these = slice(start, start + count)
            out = self._expert(x[rows[these]], expert)
            total.index_add_(0, rows[these], out.float() * weights[these])
            start += count
        return total.to(x.dtype)

    def _scores(self, x: torch.Tensor) -> torch.Tensor:
        """The router's scores, float32 [n, count]."""
        return F.linear(x.float(), self.router, self.router_bias)

    def _expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """The output of one expert, [n, hidden], for rows [n, hidden]."""
        inner = self._gated(_product(x, self.gate_up, self.gate_up_bias, expert))
        return _product(inner, self.down, self.down_bias, expert)

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        limit = self.spec.limit
        if limit is None:
            return self.ops.silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * (gate * self.spec.alpha).sigmoid() * (up + 1)


def _product(
    x: torch.Tensor, weight: torch.Tensor | PackedExperts, bias: torch.Tensor | None, expert: int
) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    return F.linear(x, weight[expert], None if bias is None else bias[expert])


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
