"""Exact prefix caching of diffusion models that denoise one block after another."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from runtime.batch import CanvasRows, Read, RowSet, Stage
from runtime.errors import ModelError
from runtime.kv.cache import PagedCache
from runtime.models.diffusion import DiffusionSpec
from runtime.protocol import DiffusionInfo
from runtime.request import Found, Request, Work
from runtime.reuse.prefix import PrefixStrategy


class BlockPrefix(PrefixStrategy):
    """The strategy of block diffusion models. A block's KV does not depend on later blocks, so whole blocks are shared.

    A step computes the rows whose KV is not final, up to the end of the block that is denoised; a long prompt takes
    several steps. The first step of a block also computes the block before it, whose tokens are all decided now.
    """

    unchunkable = True
    steady = False
    counted = ("prefill_tokens",)

    def __init__(self, cache: PagedCache, num_layers: int, spec: DiffusionSpec):
        """Raises ModelError if a page would end within a block."""
        super().__init__(cache, num_layers)
        assert spec.attended is not None
        self._spec, self._block = spec, spec.attended
        if cache.page_size % self._block:
            message = f"the model attends by blocks of {self._block} positions; use --page-size {self._block}"
            raise ModelError(f"{message}, or a multiple of it")

    @property
    def info(self) -> DiffusionInfo:
        """The model's settings, for the front end."""
        spec = self._spec
        own = (spec.attended, spec.block, spec.threshold, spec.edits)
        return DiffusionInfo(
            spec.mask_token_id, spec.algorithm, self.num_layers, "none", 1, *own, defaults=dict(spec.defaults)
        )

    def find(self, request: Request) -> Found:
        found = super().find(request)
        more = found.detail.partial_rows % self._block
        return Found(found.tokens - more, replace(found.detail, partial_rows=found.detail.partial_rows - more))

    def _most(self, request: Request) -> int:
        """Number of tokens that may be matched, in whole blocks; the last token is left if its row gives logits."""
        wanted = request.canvas is None or self._spec.logits_shift > 0
        return self._whole(len(request.tokens) - wanted)

    def _whole(self, length: int) -> int:
        return length // self._block * self._block

    def grow(self, request: Request, ahead: int = 0) -> bool:
        """Make room for the block that is denoised."""
        return super().grow(request, ahead + self._end(request) - request.sequence.num_computed - 1)

    def _end(self, request: Request) -> int:
        """End of the rows of the request's next step. Without output, this is the end of the prompt."""
        return request.prompt_len if request.canvas is None else int(request.canvas.end)

    def work(self, request: Request, limit: int) -> Work:
        start = request.sequence.num_computed
        count = self._end(request) - start
        if count > limit:
            count = min(count, self._part(request, limit))
        return Work(request, start, count, count)

    def _part(self, request: Request, most: int) -> int:
        """The number of rows to compute if at most `most` fit: whole blocks, and at least one."""
        return max(self._whole(most), self._block)

    def shrink(self, work: Work) -> bool:
        count = self._part(work.request, work.count // 2)
        if count >= work.count:
            return False
        work.count = work.num_rows = count
        return True

    def tokens_of(self, work: Work) -> Sequence[int]:
        stop = work.start + work.count
        tokens: Any = work.request.tokens if work.request.canvas is None else work.request.canvas.tokens
        return tokens[work.start : stop]

    def _stages(self, request: Request, first: int, stop: int) -> list[Stage]:
        """One stage in all layers, in which each row sees the rows up to its block's end."""
        page_size, sequence = self.cache.page_size, request.sequence
        found = request.segments[0].pages if request.segments else sequence.pages[:0]
        pages = found + sequence.pages[: -(-(stop - sequence.start) // page_size)]
        seen = np.minimum(self._seen(request, np.arange(first, stop, dtype=np.int32)), stop, dtype=np.int32)
        read = Read(np.frombuffer(pages, dtype=np.int32), stop, visible=seen)
        return [Stage(range(self.num_layers), sequence.slots(first, stop, page_size), [read])]

    def _seen(self, request: Request, rows: np.ndarray) -> np.ndarray:
        """The number of leading rows that each row of int32 [n] sees; may exceed the number of existing rows."""
        return (rows // self._block + 1) * self._block

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        """Count the blocks whose KV is final, because it was computed from decided tokens only."""
        request, stop = work.request, work.start + work.count
        final = self._whole(request.prompt_len) if request.canvas is None else request.canvas.settled
        self.counters["prefill_tokens"] += max(min(stop, request.prompt_len) - work.start, 0)
        request.sequence.num_computed = min(stop, final)
        request.sequence.seconds += seconds
        self._commit(request)
        return stop == self._end(request)

    def phase(self, request: Request) -> str:
        return "denoise" if request.sequence.num_computed >= self._whole(request.prompt_len) else "prefill"

    def report(self, request: Request) -> dict[str, Any] | None:
        return None if request.canvas is None else {"denoise_steps": request.canvas.num_steps}


class CanvasPrefix(BlockPrefix):
    """The strategy of DiffusionGemma: causal over the prompt and finished canvases, bidirectional within a canvas.

    The KV of settled tokens is final, so prefixes of any length are shared. Every step overwrites the KV of its canvas.
    The first step of the next canvas computes the finished canvas with causal rows, which write its final KV.
    """

    def rows(self, work: Work) -> list[RowSet]:
        (one,) = super().rows(work)
        first = self._settled(work.request) - work.start
        if first < work.count:
            one.canvas = CanvasRows(first, work.count, work.request.canvas.soft)
        return [one]

    def _settled(self, request: Request) -> int:
        """Leading tokens whose rows are causal."""
        return request.prompt_len if request.canvas is None else int(request.canvas.settled)

    def _part(self, request: Request, most: int) -> int:
        """The number of causal rows to compute if at most `most` fit; without causal rows, the whole canvas."""
        causal = self._settled(request) - request.sequence.num_computed
        return min(max(most, 1), causal) or self._spec.block

    def _seen(self, request: Request, rows: np.ndarray) -> np.ndarray:
        return np.where(rows < self._settled(request), rows + 1, np.iinfo(np.int32).max)
