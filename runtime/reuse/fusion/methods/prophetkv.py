"""A choice by the question in all layers, after ProphetKV: it is run once behind the stored rows."""

from __future__ import annotations

import torch

from runtime.reuse.fusion.looks import Look, QuestionLook
from runtime.reuse.fusion.methods.method import Scored


class ProphetKV(Scored):
    """The score of a row is the attention that it gets from the question, averaged over some layers."""

    name = "prophetkv"
    look = QuestionLook

    def scores(self, look: Look | None) -> torch.Tensor:
        assert isinstance(look, QuestionLook)
        return look.scores()
