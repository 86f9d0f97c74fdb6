"""The model, the KV pools and the code that computes them, on one device, and the steps that run on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from runtime.batch import ForwardBatch
from runtime.config import ModelCode
from runtime.errors import EngineDead, ModelError
from runtime.execution.attention.backend import AttentionBackend
from runtime.execution.attention.windows import LayerWindows
from runtime.execution.device import set_current
from runtime.execution.native.decoder import NativeDecoder
from runtime.execution.torch_decoder import TorchDecoder
from runtime.kv.near import NearPages
from runtime.kv.pool import KVPool
from runtime.kv.states import StatePool
from runtime.models.adapters.lora import LoraAdapter
from runtime.models.spec import ModelSpec
from runtime.sampler_state import Choosing

if TYPE_CHECKING:
    from runtime.execution.graphs import StepGraphs
    from runtime.execution.transformers.model import TransformersModel


@dataclass(slots=True)
class Decoder:
    """A model with its weights, and how its steps are computed.

    Attributes:
        forward: runs a step; see `Executor.run`.
        attention: kernels of attention: `native-` and an instruction set, `torch` or `flashinfer`.
        quantization: `int4`, `int8`, or see `LoadedModel`.
        note: why torch computes on a GPU in place of FlashInfer, and what this costs; empty otherwise.
        least_saved_tokens: see `AttentionBackend`.
        choosing: chooses tokens with the kernels; None: use torch.
        graphs: CUDA graphs of steps; None: all steps are launched kernel by kernel.
    """

    model: TorchDecoder | NativeDecoder | TransformersModel
    forward: Callable[[ForwardBatch], torch.Tensor]
    attention: str
    quantization: str = "none"
    note: str = ""
    least_saved_tokens: int = AttentionBackend.least_saved_tokens
    choosing: Choosing | None = None
    graphs: StepGraphs | None = None

    @property
    def code(self) -> ModelCode:
        """Whose code computes the model."""
        return "ramet" if isinstance(self.model, TorchDecoder | NativeDecoder) else "transformers"


@dataclass(eq=False)
class Executor:
    """Runs `ForwardBatch`es. `build_executor` makes it.

    Attributes:
        pool: KV of all layers, or of those that are not in `near`.
        near: KV of the layers with a window, if it is in a pool of its own.
        states: recurrent states of the live requests; None: the model has no recurrent layers.
        has_windows: whether some layers see only the nearest positions.
        windows: by which steps are narrowed; None: there are none, or transformers' code narrows them.
    """

    spec: ModelSpec
    context_length: int
    device: torch.device
    dtype: torch.dtype
    decoder: Decoder
    pool: KVPool
    near: NearPages | None
    states: StatePool | None
    has_windows: bool
    windows: LayerWindows | None

    @property
    def own(self) -> TorchDecoder | NativeDecoder:
        """The model in Ramet's own code; not with transformers' code."""
        assert isinstance(self.decoder.model, TorchDecoder | NativeDecoder)
        return self.decoder.model

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step. Returns float32 logits [S, vocab] of `batch.logits_rows`, valid until the next step.

        Raises ValueError for a position outside the context, where FlashInfer would read past its table of angles.
        """
        if (last := int(batch.positions.numpy().max())) >= self.context_length:
            raise ValueError(f"position {last} is outside a context of {self.context_length}")
        if self.device.type != "cpu":
            set_current(self.device)
        if self.windows is not None:
            batch = self.windows.narrow(batch, last)
        decoder = self.decoder
        logits = None if decoder.graphs is None or batch.adapters else decoder.graphs.run(batch)
        return decoder.forward(batch) if logits is None else logits

    def load_adapter(self, adapter: LoraAdapter) -> None:
        """Load an adapter for later steps. Raises ModelError if it does not fit the model."""
        if self.pool.ranks > 1 or not self.spec.causal or self.spec.states:
            where = "recurrent layers" if self.spec.causal else "a bidirectional model"
            where = "several ranks" if self.pool.ranks > 1 else where
            raise ModelError(f"adapters are not served with {where}")
        if adapter.digest not in self.decoder.model.adapters:
            self.decoder.model.load_adapter(adapter)

    def drop_adapter(self, digest: str) -> None:
        """Unload an adapter. No later step may use it."""
        self.decoder.model.adapters.pop(digest, None)

    def on_death(self, call: Callable[[EngineDead], None]) -> None:
        """Register a callback for the case that the process of another rank ends before `close`; runs on a thread."""

    def close(self) -> None:
        """End the processes of other ranks."""
