"""What the engine executes in one step: token rows, layer groups, and the attention plan of each group."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(slots=True)
class Span:
    """A run of KV rows that exist in the pool.

    Attributes:
        pages: int32 page ids in order; the span starts at row 0 of the first one.
        length: number of rows, so that the last page may be partly used.
        shift: how many positions further on the rows are reused than they were computed for. Keys are stored
            rotated and RoPE is relative, so a query is rotated by `-shift` instead of moving any key.
        keep: bool [length], which rows count; None: all.
    """

    pages: np.ndarray
    length: int
    shift: int = 0
    keep: torch.Tensor | None = None


@dataclass(slots=True)
class Edge:
    """A group of query rows that attends to a span.

    Attributes:
        rows: rows of the layer group: a slice if they are contiguous, else int64 [n].
        span: index into the plan's spans.
        visible: int32 [n]; row i sees the first `visible[i]` rows of the span, 0 to its length. None: all rows see the
            whole span.
    """

    rows: slice | torch.Tensor
    span: int
    visible: np.ndarray | None = None


def causal_visible(length: int, rows: int) -> np.ndarray | None:
    """`Edge.visible` of query rows that are the last `rows` rows of a span of `length`; None for one row."""
    return None if rows == 1 else np.arange(length - rows + 1, length + 1, dtype=np.int32)


@dataclass(slots=True)
class AttentionPlan:
    """Query groups x spans; partial results of a row merge by log-sum-exp. The same meaning on every backend."""

    num_rows: int
    spans: list[Span] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def add(self, rows: slice | torch.Tensor, span: Span, visible: np.ndarray | None = None) -> None:
        """Add a span and the one edge that reads it."""
        self.spans.append(span)
        self.edges.append(Edge(rows, len(self.spans) - 1, visible))


@dataclass(slots=True)
class HiddenRows:
    """Hidden states of some of a step's rows between two layers.

    Attributes:
        rows: int64 [n], flat rows of the step.
        states: float32 [n, hidden], contiguous; the device's.
    """

    rows: torch.Tensor
    states: torch.Tensor


@dataclass(slots=True)
class LayerGroup:
    """Consecutive layers that share one attention plan.

    Attributes:
        layers: the range of layer indices.
        rows: int64 [T'], the flat rows that are alive in these layers; None: all.
        kv_write: int64 [T'], the pool slot that takes each row's new K and V; -1: not written.
        attention: the plan; rows of its edges count within this group.
        load: states that rows enter the first layer with, instead of what they had; for rows that join here.
        save: takes the states with which rows leave the last layer.
    """

    layers: range
    rows: torch.Tensor | None
    kv_write: torch.Tensor
    attention: AttentionPlan
    load: list[HiddenRows] = field(default_factory=list)
    save: list[HiddenRows] = field(default_factory=list)


@dataclass(slots=True)
class ForwardBatch:
    """One step of the model over many requests. Its tensors are the host's, except where it says otherwise.

    Attributes:
        tokens: int64 [T], the flat rows of all requests; the device's if a step chose them that was not read yet.
        positions: int64 [T], explicit position ids; they need not be contiguous.
        groups: cover all layers in order.
        logits_rows: int64 [S], the flat rows for which the head runs.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    groups: list[LayerGroup]
    logits_rows: torch.Tensor
