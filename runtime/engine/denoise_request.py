"""A request to a diffusion model, from arrival to its one terminal event, and its share of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from radix import Namespace
from runtime.diffusion.canvas import Denoiser
from runtime.diffusion.fast_dllm import active_rows
from runtime.params import DiffusionParams
from runtime.request import Request


@dataclass(slots=True, eq=False, kw_only=True)
class DenoiseRequest(Request):
    """A canvas that waits or runs.

    `tokens` is the prompt. `pages` holds the tree's pages of the shared prefix (`num_tree_pages`, where layers are
    reused), then private pages for every position of the canvas; the KV of prefix rows in the layers that are not
    reused lies in the latter. With guidance there are as many again, for the canvas without its prompt.

    Attributes:
        denoiser: the canvas.
        params: how it is denoised, filled.
        interval: steps between two refreshes of the prefix.
        prefix_len: shared leading positions, whole pages; 0: none. Set at admission, as the next three.
        encoded_len: tokens that were encoded together with them; more than `prefix_len` where part of it matches.
        depth: layers in which they are reused.
        encoding: the tree's namespace of the prefix; None without reuse.
        is_encoding: whether the next step encodes the prefix alone.
        boundary: states with which the prefix enters layer `depth`, float32 [prefix_len, hidden], once known.
        num_steps: denoising steps done; `refreshed_at`: the number of the last one that refreshed.
        refreshes: how many did.
        num_sent: output tokens that were reported.
        turn: serial of the engine's step in which this request last took part.
    """

    denoiser: Denoiser
    params: DiffusionParams
    interval: int
    prefix_len: int = 0
    encoded_len: int = 0
    depth: int = 0
    encoding: Namespace | None = None
    is_encoding: bool = False
    boundary: torch.Tensor | None = None
    num_steps: int = 0
    refreshed_at: int = -1
    refreshes: int = 0
    num_sent: int = 0
    turn: int = 0

    @property
    def length(self) -> int:
        """Positions of the canvas."""
        return len(self.denoiser.tokens)

    @property
    def num_output(self) -> int:
        """Output tokens that were reported."""
        return self.num_sent

    @property
    def phase(self) -> str:
        """What it is at, for people."""
        if not self.pages:
            return "waiting"
        return "encode" if self.is_encoding else "denoise"

    @property
    def prefix_ratio(self) -> float:
        """The shared prefix's share of the canvas."""
        return self.prefix_len / self.length

    @property
    def is_partial(self) -> bool:
        """Whether what it shares is the beginning of a longer encoding."""
        return bool(self.encoding) and self.encoded_len > self.prefix_len

    @property
    def num_canvases(self) -> int:
        """How often the canvas needs pages: with guidance, once more for the pass without the prompt."""
        return 2 if self.params.cfg_scale else 1

    def work(self, num_layers: int) -> DenoiseWork:
        """What the next step computes."""
        if self.is_encoding:
            return DenoiseWork(self, range(self.prefix_len), False)
        refresh = self._is_due() and self.prefix_len > 0 and self.depth < num_layers
        item = DenoiseWork(self, self._active(self.prefix_len), refresh)
        if self.params.cfg_scale:
            item.unprompted_rows = self._active(0)
        return item

    def _active(self, first: int) -> range:
        """The rows, from `first` on, that the next step computes."""
        denoiser = self.denoiser
        shift, rows = denoiser.spec.logits_shift, range(first, self.length)
        return active_rows(self.params.cache, denoiser.is_block_start, denoiser.block, shift, rows)

    def _is_due(self) -> bool:
        """Whether the prefix is refreshed: every `interval` steps; with a Fast-dLLM cache at a block's beginning."""
        if self.params.cache == "none":
            return self.num_steps % self.interval == 0
        since = self.num_steps - self.refreshed_at
        return self.denoiser.is_block_start and (self.refreshed_at < 0 or since >= self.interval)

    def report(self) -> dict[str, Any]:
        """What the response says of the reuse."""
        return {
            "shallow_depth": self.depth if self.encoding else 0,
            "encoded_tokens": self.encoded_len if self.encoding else 0,
            "refreshes": self.refreshes,
            "prefix_ratio": round(self.prefix_ratio, 4),
            "denoise_steps": self.num_steps,
        }


@dataclass(slots=True)
class DenoiseWork:
    """A request's share of a step.

    Attributes:
        rows: positions that are computed in all layers: the prefix while it is encoded, else those after it.
        refresh: whether the prefix's rows are computed as well, in the layers that are not reused.
        unprompted_rows: positions that are computed once more, in all layers, without the prompt, for guidance.
        logits, unprompted_logits: which rows of the step's logits are this request's.
        boundary: takes boundary states that this step computes; None: none.
    """

    request: DenoiseRequest
    rows: range
    refresh: bool
    unprompted_rows: range = range(0)
    logits: slice = field(default_factory=lambda: slice(0, 0))
    unprompted_logits: slice = field(default_factory=lambda: slice(0, 0))
    boundary: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.rows) + (self.request.prefix_len if self.refresh else 0) + len(self.unprompted_rows)

    def shrink(self) -> bool:
        """False: rows that see each other cannot be cut."""
        return False
