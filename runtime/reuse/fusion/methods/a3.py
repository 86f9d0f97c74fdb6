"""A3 (attention-aware fusion): the rows to which the question attends in layer 1."""

from __future__ import annotations

import math

import numpy as np
import torch

from runtime.reuse.fusion.looks import DenseLook, Look, smooth
from runtime.reuse.fusion.methods.method import Scored


class A3(Scored):
    """One softmax over the concatenated heads for each row of the question, summed, and smoothed over neighbours."""

    name = "a3"
    look = DenseLook

    def scores(self, look: Look | None) -> torch.Tensor:
        assert isinstance(look, DenseLook)
        candidates, queries = self.layout.candidates, look.queries()
        question = np.arange(self.layout.question, len(self.layout.prompt))
        keys = look.true_keys(np.concatenate((candidates, question)))
        grouped = queries.unflatten(1, (keys.shape[1], -1)).sum(2)  # as if each key stood beside its several queries
        logits = grouped.flatten(1) @ keys.flatten(1).T / math.sqrt(queries[0].numel())
        later = torch.ones(len(question), len(question), dtype=torch.bool, device=logits.device).triu(1)
        logits[:, len(candidates) :].masked_fill_(later, -torch.inf)
        summed = logits.softmax(dim=-1)[:, : len(candidates)].sum(0)
        return smooth(summed)
