"""Full reuse: the question's rows are reused, too; the last row alone is computed."""

from __future__ import annotations

from runtime.reuse.fusion.methods.pie import Pie


class Full(Pie):
    """The baseline that needs least. `asked.variant` says whether rows are moved to their places."""

    name = "full"
    reuses_question = True
