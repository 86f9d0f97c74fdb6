"""Mixtures of experts in torch: each row's router, and the sum of the experts that it chose."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.execution.ops import Ops
from runtime.models.experts import ExpertSpec


class Experts:
    """The experts of one layer."""

    def __init__(
        self,
        spec: ExpertSpec,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        ops: Ops,
    ):
        """Take weights on one device.

        Args:
            spec: number of experts, and of those that a row takes.
            router: [count, hidden].
            bias: float32 [count], on the scores by which experts are chosen.
            gate_up: [count, 2 * inner, hidden].
            down: [count, hidden, inner].
            ops: small operations.
        """
        self.spec, self.ops = spec, ops
        self.router, self.bias = router.float(), bias
        self.gate_up, self.down = gate_up, down

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int64 [T, chosen] of rows [T, hidden], and their weights, float32 [T, chosen]."""
        spec = self.spec
        scores = F.linear(x.float(), self.router)
        scores = scores.sigmoid() if spec.sigmoid else scores.softmax(-1)
        ranks = scores if self.bias is None else scores + self.bias
        if spec.groups > 1:
            grouped = ranks.unflatten(1, (spec.groups, -1))
            best = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1)
            hidden = torch.ones_like(best, dtype=torch.bool)
            hidden.scatter_(1, best.topk(spec.chosen_groups).indices, False)
            ranks = grouped.masked_fill(hidden[..., None], -torch.inf).flatten(1)
        experts = ranks.topk(spec.chosen).indices
        weights = scores.gather(1, experts)
        if spec.normalized:
            # Sigmoids may all underflow.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * spec.scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each row's experts, [T, hidden], summed in float32; one product for each expert."""
        experts, weights = self.choose(x)
        order = experts.flatten().argsort()
        rows, weights = order // self.spec.chosen, weights.flatten()[order, None]
        total, start = torch.zeros_like(x, dtype=torch.float32), 0
        for expert, count in enumerate(experts.flatten().bincount(minlength=self.spec.count).tolist()):
            if not count:
                continue
            these = slice(start, start + count)
            inner = self.ops.silu_and_mul(F.linear(x[rows[these]], self.gate_up[expert]))
            total.index_add_(0, rows[these], F.linear(inner, self.down[expert]).float() * weights[these])
            start += count
        return total.to(x.dtype)
