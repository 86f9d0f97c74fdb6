"""One page of all parts of `ramet bench gpu`: the targets, what was measured, a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loadgen.gpu.figures import Figures, shown
from loadgen.harness.plots import drawing
from loadgen.harness.report import markdown_table


class Target(NamedTuple):
    """A bound of a figure.

    Attributes:
        says: for the table.
        part, item, figure: where it stands; `item` may end with `*`.
        bound: of the figure; at least, or, with `most`, at most.
    """

    says: str
    part: str
    item: str
    figure: str
    bound: float
    most: bool = False


TARGETS = (
    Target("decode, 32 requests, of the bandwidth bound, %", "speed", "decode, 32 x 1024", "of the bound, %", 70),
    Target("prefill, of the matrix bound, %", "speed", "prefill, *", "of the bound, %", 50),
    Target("first token warm over its ideal share", "speed", "warm and cold", "over ideal", 1.5, most=True),
    Target("plain over cascade, 32 requests", "speed", "32 behind 4096 shared", "plain over cascade", 1.3),
    Target("attention, relative error", "correctness", "attention, *", "relative error", 0.01, most=True),
    Target("tokens in float32 as transformers", "correctness", "greedy tokens in float32", "as transformers", 1.0),
    Target("tokens one step ahead", "correctness", "greedy tokens one step ahead as in step", "cold", 1.0),
)


def write_page(out: Path, parts: Sequence[str]) -> None:
    """Write `gpu.md` and `gpu.png` of the parts that `out` has figures of."""
    found = {part: read(out / f"gpu-{part}.jsonl") for part in parts if (out / f"gpu-{part}.jsonl").exists()}
    if not any(found.values()):
        return
    sections = ["# On a GPU\n", _judged(found)]
    for part in found:
        sections.append(f"## {part}\n\n{(out / f'gpu-{part}.md').read_text('utf-8')}")
    if _bars(found):
        sections.insert(1, "![share of what the machine allows](gpu.png)\n")
        _plot(found, out / "gpu.png")
    (out / "gpu.md").write_text("\n".join(sections), encoding="utf-8")


def read(path: Path) -> dict[str, Figures]:
    """Figures by item; the last of an item counts."""
    lines = map(json.loads, path.read_text("utf-8").splitlines())
    return {line["of"]: line["outcome"] for line in lines if "of" in line}


def judge(target: Target, found: dict[str, dict[str, Figures]]) -> tuple[Any, str]:
    """The figure of a target, and whether it is met; of bounds from above the worst one counts, else the best."""
    values = [
        figures[target.figure]
        for item, figures in found.get(target.part, {}).items()
        if (item.startswith(target.item[:-1]) if target.item.endswith("*") else item == target.item)
        and target.figure in figures
    ]
    if not values:
        return None, "not measured"
    value = max(values)
    return value, "met" if (value <= target.bound if target.most else value >= target.bound) else "missed"


def _judged(found: dict[str, dict[str, Figures]]) -> str:
    rows = []
    for target in TARGETS:
        value, verdict = judge(target, found)
        bound = f"{'at most' if target.most else 'at least'} {target.bound:g}"
        rows.append([target.says, bound, "" if value is None else shown(value), verdict])
    return markdown_table(["", "target", "measured", ""], rows)


def _bars(found: dict[str, dict[str, Figures]]) -> list[tuple[str, float]]:
    of_bound = "of the bound, %"
    return [(item, row[of_bound]) for item, row in found.get("speed", {}).items() if of_bound in row]


def _plot(found: dict[str, dict[str, Figures]], path: Path) -> None:
    bars = _bars(found)
    with drawing(path, (8, 1 + 0.3 * len(bars))) as axes:
        axes.barh([name for name, _ in bars], [share for _, share in bars])
        axes.invert_yaxis()
        axes.set_xlabel("of what bandwidth or matrix units allow, %")
        axes.grid(axis="x", alpha=0.3)
