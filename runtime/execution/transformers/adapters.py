"""Low-rank adapters of models in transformers' code, added by forward hooks on linear layers."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from runtime.batch import AdapterRows
from runtime.errors import ModelError
from runtime.models.adapters.lora import LoraAdapter, LowRank


class HookedAdapters:
    """The adapters of a model.

    Attributes:
        rows: ranges of rows with an adapter in the running step.
        num_rows: number of rows of the running step.
        loaded: by digest of the adapter, its factors by module.
    """

    def __init__(self, model: transformers.PreTrainedModel):
        self._model = model
        self._hooked: set[str] = set()
        self.rows: Sequence[AdapterRows] = ()
        self.num_rows = 0
        self.loaded: dict[str, dict[str, LowRank]] = {}

    def load(self, adapter: LoraAdapter, dtype: torch.dtype, device: torch.device) -> None:
        """Load an adapter. Raises ModelError if it does not fit the model."""
        modules, kind = dict(self._model.named_modules()), type(self._model).__name__
        head = self._model.get_output_embeddings()
        for name, factor in adapter.factors.items():
            module = modules.get(name)
            # Experts get only the rows routed to them, in another order, so a hook could not tell the rows apart.
            if not isinstance(module, nn.Linear) or ".experts." in name or module is head:
                raise ModelError(f"the adapter changes {name}, which is no linear layer of {kind}'s decoder")
            if (shape := (len(factor.b), factor.a.shape[1])) != tuple(module.weight.shape):
                shown = f"{list(shape)}; the model's is {list(module.weight.shape)}"
                raise ModelError(f"the adapter changes {name} of shape {shown}")
        for name in adapter.factors.keys() - self._hooked:
            modules[name].register_forward_hook(partial(self._add, name))
            self._hooked.add(name)
        self.loaded[adapter.digest] = {name: factor.to(dtype, device) for name, factor in adapter.factors.items()}

    def _add(self, name: str, module: nn.Module, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> Any:
        if not self.rows:
            return
        x, flat = given[0].flatten(0, -2), out.view(-1, out.shape[-1])
        if len(x) != self.num_rows:
            raise NotImplementedError(f"{name} computes {len(x)} rows of a step of {self.num_rows}")
        for digest, first, stop in self.rows:
            if (factor := self.loaded[digest].get(name)) is not None:
                factor.add(flat[first:stop], x[first:stop])
