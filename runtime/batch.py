"""The plan of one step: token rows, layer groups, and the attention plan of each group; requests' shares of it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch


@dataclass(slots=True)
class Span:
    """KV rows in the pool.

    Attributes:
        pages: int32 page ids in order; the span starts at row 0 of the first page.
        length: number of rows; the last page may be partly used.
        shift: distance in positions from where the rows were computed to where they are reused. Keys are stored
            rotated and RoPE is relative, so the queries are rotated by `-shift` and the keys stay as they are.
        keep: bool [length], False for rows that are left out; None: all rows are used.
        position: position of row 0; later rows have the next positions. Only sliding windows need it, and only for
            prefixes.
    """

    pages: np.ndarray
    length: int
    shift: int = 0
    keep: torch.Tensor | None = None
    position: int = 0


@dataclass(slots=True)
class Edge:
    """A group of query rows that attends to a span.

    Attributes:
        rows: rows of the layer group: a slice if they are contiguous, else int64 [n].
        span: index into the plan's spans.
        visible: int32 [n]; row i sees the first `visible[i]` rows of the span, 0 to its length. None: all rows see the
            whole span.
        hidden: int32 [n]; row i does not see the first `hidden[i]` rows, 0 to `visible[i]`. None: no row is hidden.
    """

    rows: slice | torch.Tensor
    span: int
    visible: np.ndarray | None = None
    hidden: np.ndarray | None = None


def causal_visible(length: int, rows: int) -> np.ndarray | None:
    """`Edge.visible` of query rows that are the last `rows` rows of a span of `length`; None for one row."""
    return None if rows == 1 else np.arange(length - rows + 1, length + 1, dtype=np.int32)


@dataclass(slots=True)
class AttentionPlan:
    """Attention of a layer group: query rows x spans. A row's partial results are merged by log-sum-exp.

    `version`: plans of the same version differ only in lengths and pages of their spans; 0: no other plan is like this.
    """

    num_rows: int
    spans: list[Span] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    version: int = 0

    def add(
        self,
        rows: slice | torch.Tensor,
        span: Span,
        visible: np.ndarray | None = None,
        hidden: np.ndarray | None = None,
    ) -> None:
        """Add a span and the one edge that reads it."""
        self.spans.append(span)
        self.edges.append(Edge(rows, len(self.spans) - 1, visible, hidden))


@dataclass(slots=True)
class HiddenRows:
    """Hidden states of some of a step's rows between two layers.

    Attributes:
        rows: int64 [n], flat rows of the step.
        states: float32 [n, hidden], contiguous, on the device.
    """

    rows: torch.Tensor
    states: torch.Tensor


@dataclass(slots=True)
class LayerGroup:
    """Consecutive layers that share one attention plan.

    Attributes:
        layers: the range of layer indices.
        rows: int64 [T'], the flat rows that are alive in these layers; None: all.
        kv_write: int64 [T'], the pool slot of each row's new K and V; -1: not written.
        attention: its rows are indices into `rows`.
        load: hidden states that replace those of some rows before the first layer.
        save: rows whose hidden states after the last layer are wanted; the model fills in `states`.
    """

    layers: range
    rows: torch.Tensor | None
    kv_write: torch.Tensor
    attention: AttentionPlan
    load: list[HiddenRows] = field(default_factory=list)
    save: list[HiddenRows] = field(default_factory=list)


class AdapterRows(NamedTuple):
    """Flat rows of a step, from `first` up to `stop` (exclusive), computed with the adapter `digest`."""

    digest: str
    first: int
    stop: int


@dataclass(slots=True)
class StateRows:
    """Consecutive tokens of one sequence, which recurrent layers compute one after the other.

    Attributes:
        first, stop: range of rows of the step or of a row set.
        slot: slot of the state pool with the state before row `first`.
        target: slot for the state after the last row, without the rows of a draft. If it differs from `slot`, a step
            that failed can be run again.
        saves: (row, slot) pairs: the state after a row is also wanted in another slot.
        draft: number of last rows that are guesses. The layers keep what computes these rows again, for `target`.
        accepted: number of guesses kept for `slot` that were right; the layers compute these rows again first.
    """

    first: int
    stop: int
    slot: int
    target: int
    saves: list[tuple[int, int]] = field(default_factory=list)
    draft: int = 0
    accepted: int = 0


@dataclass(slots=True)
class ForwardBatch:
    """One step of the model over many requests. Tensors are on the host except where noted.

    Attributes:
        tokens: int64 [T], the flat rows of all requests; on the device if an earlier step chose them and the host has
            not read them.
        positions: int64 [T], position ids; they need not be contiguous.
        axes: int64 [T, 3], positions in time, height and width, which rotate the rows; None: all three are `positions`.
        groups: in the order of their layers; layers in which no row is computed have no group.
        logits_rows: int64 [S], the flat rows whose logits are computed.
        adapters: rows with an adapter, in order; the rows of one adapter are adjacent.
        states: for models with recurrent layers; each row of the step is in exactly one of them.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    groups: list[LayerGroup]
    logits_rows: torch.Tensor
    adapters: list[AdapterRows] = field(default_factory=list)
    states: list[StateRows] = field(default_factory=list)
    axes: torch.Tensor | None = None


@dataclass(slots=True)
class Read:
    """KV that the rows of a stage attend to.

    Attributes:
        pages, length, shift, keep, position: see `Span`.
        visible: int32, how many leading rows each query row sees; None: all of them.
        rows: the rows that read, as a range of those alive in the stage; None: all of them.
    """

    pages: np.ndarray
    length: int
    shift: int = 0
    keep: torch.Tensor | None = None
    visible: np.ndarray | None = None
    rows: slice | None = None
    position: int = 0


@dataclass(slots=True)
class Stage:
    """A range of layers in which a row set computes the same rows and reads the same KV.

    Attributes:
        layers: the range.
        writes: int64, the pool slot of each alive row's new K and V; -1: not written.
        reads: what the rows attend to, written rows included.
        alive: int64, the rows of the set that are computed, ascending; None: all.
        load: rows of the set and the states float32 [n, hidden] with which they enter the first layer.
        save: rows of the set whose states after the last layer are wanted.
    """

    layers: range
    writes: np.ndarray
    reads: list[Read]
    alive: np.ndarray | None = None
    load: tuple[np.ndarray, torch.Tensor] | None = None
    save: np.ndarray | None = None


@dataclass(slots=True)
class RowSet:
    """The rows of one request in a step.

    Attributes:
        tokens, positions: int64 [n].
        axes: int64 [n, 3], see `ForwardBatch`.
        stages: what the rows do in each range of layers; together the stages cover all layers, in order.
        logits: int64, the rows whose logits are wanted, ascending.
        adapter: digest of the adapter that computes the rows; empty: none.
        state: all rows, for a model with recurrent layers; None for other models.
    """

    tokens: np.ndarray
    positions: np.ndarray
    stages: list[Stage]
    logits: np.ndarray
    adapter: str = ""
    state: StateRows | None = None
    axes: np.ndarray | None = None

    @property
    def row_layers(self) -> int:
        """Rows x layers that are computed."""
        return sum(len(stage.writes) * len(stage.layers) for stage in self.stages)
