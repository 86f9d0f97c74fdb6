"""The similarity of every layer at every ratio as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def draw_heat_map(table: dict[str, Any], path: Path) -> None:
    """Write a PNG of a profile's table; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ratios = list(table["similarity"])
    values = np.array([table["similarity"][ratio] for ratio in ratios]).T
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(values, origin="lower", aspect="auto", cmap="viridis", vmin=min(values.min(), 0.9), vmax=1)
    figure.colorbar(image, label="cosine similarity of the prefix's KV")
    columns = range(len(ratios))
    for rule, style in (("depths_cosine", "w--"), ("depths", "r-")):
        depths = [table[rule][ratio] - 0.5 for ratio in ratios]
        axes.step(columns, depths, style, where="mid", label=_LABELS[rule])
    axes.set_xticks(columns, [str(ratio) for ratio in ratios])
    axes.set_yticks(range(0, len(values), max(len(values) // 10, 1)))
    axes.set_yticklabels([str(layer + 1) for layer in axes.get_yticks().astype(int)])
    axes.set_xlabel("shared part of the request, %")
    axes.set_ylabel("layer")
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)


_LABELS = {"depths_cosine": "depth by the paper's rule", "depths": "depth in the table"}
