"""Exact prefix caching of diffusion models that denoise one block after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from runtime.batch import Read, Stage
from runtime.errors import ModelError
from runtime.features.diffusion.ask import DenoisingReport, DiffusionInfo
from runtime.features.diffusion.canvas import BidirectionalCanvas, BlockCanvas
from runtime.features.diffusion.decoding import canvas_of
from runtime.features.diffusion.noise import NoiseCanvas
from runtime.features.diffusion.published import DiffusionSpec
from runtime.kv.cache import PagedCache
from runtime.request import Found, Request, Work
from runtime.reuse.prefix import PrefixLease, PrefixStrategy


class BlockLease(PrefixLease):
    """A step computes the rows whose KV is not final, up to the end of the block that is denoised.

    A long prompt takes several steps. The first step of a block also computes the block before it, whose tokens are all
    decided now.
    """

    strategy: BlockPrefix

    def __init__(self, strategy: BlockPrefix, request: Request):
        super().__init__(strategy, request)
        self._spec, self._block = strategy.spec, strategy.block
        canvas = canvas_of(request)
        assert not isinstance(canvas, BidirectionalCanvas)
        self.canvas: BlockCanvas | NoiseCanvas | None = canvas  # None: it wants no tokens

    def look(self) -> Found:
        found = super().look()
        more = found.match.partial_rows % self._block
        return Found(found.tokens - more, replace(found.match, partial_rows=found.match.partial_rows - more))

    def _most(self) -> int:
        """Number of tokens that may be matched, in whole blocks; the last token is left if its row gives logits."""
        wanted = self.canvas is None or self._spec.logits_shift > 0
        return self._whole(len(self.request.tokens) - wanted)

    def _whole(self, length: int) -> int:
        return length // self._block * self._block

    def grow(self, ahead: int = 0) -> bool:
        """Make room for the block that is denoised."""
        return super().grow(ahead + self._end() - self.request.sequence.num_computed - 1)

    def _end(self) -> int:
        """End of the rows of the request's next step. Without output, this is the end of the prompt."""
        request = self.request
        return request.prompt_len if self.canvas is None else self.canvas.end

    def work(self, limit: int) -> Work:
        start = self.request.sequence.num_computed
        count = self._end() - start
        if count > limit:
            count = min(count, self._part(limit))
        return Work(self.request, start, count, count)

    def _part(self, most: int) -> int:
        """The number of rows to compute if at most `most` fit: whole blocks, and at least one."""
        return max(self._whole(most), self._block)

    def shrink(self, work: Work) -> bool:
        count = self._part(work.count // 2)
        if count >= work.count:
            return False
        work.count = work.num_rows = count
        return True

    def tokens_of(self, work: Work) -> Sequence[int]:
        stop = work.start + work.count
        tokens: Any = work.request.tokens if self.canvas is None else self.canvas.tokens
        return tokens[work.start : stop]

    def _stages(self, first: int, stop: int) -> list[Stage]:
        """One stage in all layers, in which each row sees the rows up to its block's end."""
        request = self.request
        page_size, sequence = self.cache.page_size, request.sequence
        found = request.segments[0].pages if request.segments else sequence.pages[:0]
        pages = found + sequence.pages[: -(-(stop - sequence.start) // page_size)]
        seen = np.minimum(self._seen(np.arange(first, stop, dtype=np.int32)), stop, dtype=np.int32)
        read = Read(np.frombuffer(pages, dtype=np.int32), stop, visible=seen)
        return [Stage(range(self.strategy.num_layers), sequence.slots(first, stop, page_size), [read])]

    def _seen(self, rows: np.ndarray) -> np.ndarray:
        """The number of leading rows that each row of int32 [n] sees; may exceed the number of existing rows."""
        return (rows // self._block + 1) * self._block

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        """Count the blocks whose KV is final, because it was computed from decided tokens only."""
        request, stop = work.request, work.start + work.count
        final = self._whole(request.prompt_len) if self.canvas is None else self.canvas.settled
        self.strategy.counters["prefill_tokens"] += max(min(stop, request.prompt_len) - work.start, 0)
        request.sequence.num_computed = min(stop, final)
        request.sequence.seconds += seconds
        self._commit()
        return stop == self._end()

    def phase(self) -> str:
        return "denoise" if self.request.sequence.num_computed >= self._whole(self.request.prompt_len) else "prefill"

    def report(self) -> DenoisingReport | None:
        return None if self.canvas is None else DenoisingReport(self.canvas.num_steps)


class BlockPrefix(PrefixStrategy[None]):
    """The strategy of block diffusion models. Whole blocks are shared: their KV does not depend on later blocks."""

    unchunkable = True
    steady = False
    counted = ("prefill_tokens",)

    def __init__(self, cache: PagedCache, num_layers: int, spec: DiffusionSpec):
        """Raises ModelError if a page would end within a block."""
        super().__init__(cache, num_layers)
        assert spec.attended is not None
        self.spec, self.block = spec, spec.attended
        if cache.page_size % self.block:
            message = f"the model attends by blocks of {self.block} positions; use --page-size {self.block}"
            raise ModelError(f"{message}, or a multiple of it")

    @property
    def info(self) -> DiffusionInfo:
        """The model's settings, for the front end."""
        spec = self.spec
        own = (spec.attended, spec.block, spec.threshold, spec.edits)
        return DiffusionInfo(
            spec.mask_token_id, spec.algorithm, self.num_layers, "none", 1, *own, defaults=dict(spec.defaults)
        )

    def open(self, request: Request, ask: None) -> BlockLease:
        return BlockLease(self, request)


class CanvasLease(BlockLease):
    """Rows of DiffusionGemma: causal over the prompt and finished canvases, bidirectional within a canvas.

    The KV of settled tokens is final, so prefixes of any length are shared. Every step overwrites the KV of its canvas.
    The first step of the next canvas computes the finished canvas with causal rows, which write its final KV.
    """

    strategy: CanvasPrefix

    def _stages(self, first: int, stop: int) -> list[Stage]:
        """As of blocks; the rows of the canvas enter the model with soft embeddings, all 0 in a canvas' first step."""
        (stage,) = super()._stages(first, stop)
        if (settled := self._settled()) < stop:
            assert isinstance(self.canvas, NoiseCanvas)
            soft = self.canvas.soft
            states = torch.zeros(stop - settled, self.strategy.hidden_size) if soft is None else soft
            stage.load = (np.arange(settled - first, stop - first), states)
        return [stage]

    def _settled(self) -> int:
        """Leading tokens whose rows are causal."""
        request = self.request
        return request.prompt_len if self.canvas is None else self.canvas.settled

    def _part(self, most: int) -> int:
        """The number of causal rows to compute if at most `most` fit; without causal rows, the whole canvas."""
        causal = self._settled() - self.request.sequence.num_computed
        return min(max(most, 1), causal) or self._spec.block

    def _seen(self, rows: np.ndarray) -> np.ndarray:
        return np.where(rows < self._settled(), rows + 1, np.iinfo(np.int32).max)


class CanvasPrefix(BlockPrefix):
    """The strategy of DiffusionGemma."""

    def __init__(self, cache: PagedCache, num_layers: int, spec: DiffusionSpec, hidden_size: int):
        super().__init__(cache, num_layers, spec)
        self.hidden_size = hidden_size

    def open(self, request: Request, ask: None) -> CanvasLease:
        return CanvasLease(self, request)
