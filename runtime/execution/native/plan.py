"""Attention plans as C arrays."""

from typing import Any

import numpy as np
import torch

from runtime.batch import AttentionPlan, rows_of
from runtime.execution.native import library as c
from runtime.models.rope import RotaryEmbedding


class NativePlan:
    """The spans and edges of a plan as C arrays. Their pointers are valid while this object exists.

    Attributes:
        version: of the original plan.
        spans, edges: ctypes arrays of `library.SpanStruct` and `library.EdgeStruct`.
    """

    def __init__(self, plan: AttentionPlan, rope: RotaryEmbedding):
        self._kept: list[Any] = []
        self.version, self.num_edges = plan.version, len(plan.edges)
        self._pages: list[np.ndarray | None] = [None] * len(plan.spans)
        self.spans = (c.SpanStruct * len(plan.spans))()
        self.edges = (c.EdgeStruct * self.num_edges)()
        for to, span in zip(self.spans, plan.spans, strict=True):
            to.position = span.position
            if span.keep is not None:
                to.keep = self._tensor(span.keep)
            if span.shift:
                to.turn = self._tensor(torch.cat(rope.shift(torch.tensor([-span.shift]))))
        every_row = self._array(np.arange(plan.num_rows, dtype=np.int32), np.int32)
        for to, edge in zip(self.edges, plan.edges, strict=True):
            if isinstance(edge.rows, slice) and edge.rows.step in (None, 1):
                start, stop, _ = edge.rows.indices(plan.num_rows)
                to.rows, to.num_rows = every_row + 4 * start, max(stop - start, 0)
            else:
                rows = rows_of(edge, plan.num_rows)
                to.rows, to.num_rows = self._array(rows, np.int32), len(rows)
            to.span = edge.span
            if edge.visible is not None:
                to.visible = self._array(edge.visible, np.int32)
            if edge.hidden is not None:
                to.hidden = self._array(edge.hidden, np.int32)
        self.grow(plan)

    def grow(self, plan: AttentionPlan) -> None:
        """Update lengths and pages of the spans from a plan of the same version."""
        for i, (to, span) in enumerate(zip(self.spans, plan.spans, strict=True)):
            to.length = span.length
            if span.pages is not self._pages[i]:
                self._pages[i] = pages = np.ascontiguousarray(span.pages, dtype=np.int32)
                to.pages = pages.ctypes.data

    def _array(self, array: np.ndarray, dtype: type) -> int:
        array = np.ascontiguousarray(array, dtype=dtype)
        self._kept.append(array)
        return array.ctypes.data

    def _tensor(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()
