"""Full reuse: the question's rows are reused, too; the last row alone is computed."""

from __future__ import annotations

from runtime.reuse.fusion.methods.pie import Pie


class Full(Pie):
    """The baseline of the papers, which computes least."""

    name = "full"
    reuses_question = True
