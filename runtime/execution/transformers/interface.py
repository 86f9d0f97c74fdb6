"""Attention and mask functions that transformers' modelling code calls instead of its own."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from runtime.execution.attention.torch_attention import Scores
from runtime.execution.attention.windows import Window

NAME = "ramet"

# Arguments of attention functions that have no effect on the result here.
_HARMLESS = {"dropout", "sliding_window", "position_ids", "cache_position", "output_attentions", "is_causal"}


class LayerCall(NamedTuple):
    """A layer's call of attention: q [T, heads, dim], k and v [T, kv_heads, dim]; q and k already have RoPE, if any."""

    module: nn.Module
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    window: Window | None
    scores: Scores


# Computes the attention of a layer, [T, heads, dim of v], in the forward pass that runs on this thread.
attention: ContextVar[Callable[[LayerCall], torch.Tensor]] = ContextVar("attention")


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Window | torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with transformers' signature: q, k, v [1, heads, T, dim]; returns [1, T, heads, dim]."""
    unknown = [name for name, value in others.items() if isinstance(value, torch.Tensor) and name not in _HARMLESS]
    if unknown:
        raise NotImplementedError(f"its attention has an argument {unknown[0]!r}")
    if isinstance(attention_mask, torch.Tensor):
        raise NotImplementedError("it makes masks of its own")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError("its attention is not causal")
    q, k, v = (rows[0].transpose(0, 1) for rows in (query, key, value))
    scores = Scores(q.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux, k.shape[1])
    return attention.get()(LayerCall(module, q, k, v, attention_mask, scores))[None], None


def _mask(*, config: Any, local_size: int | None = None, **_: Any) -> Window | None:
    """The window of a layer type, which transformers passes to `_attend` as `attention_mask`; None: no window."""
    if local_size is None:
        return None
    return Window(local_size, chunked=local_size != getattr(config, "sliding_window", None))


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
