"""Tables and the plot of `ramet bench reasoning`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.accuracy.sections import Section
from loadgen.http.outputs import drawing
from loadgen.micro.intervals import centred, interval, shown

# As the ReasonCache paper has them, means over seven tasks of each of three models of 14 to 32 billion weights.
PUBLISHED = (
    "published: R1-Distill-Qwen-32B / QwQ-32B / Phi-4-reasoning-plus: tokens/s +56 / +59 / +43 %, "
    "AMSR 21.9 / 21.1 / 17.1 %, 96.9 / 97.6 / 98.3 % of the accuracy kept; random sharing of as many pages: "
    "+54 / +59 / +43 %, and 53 / 51 / 46 % of the accuracy; 13.5 ms of CPU time a step"
)
_EXACT = "exact"
_DRAWS = 2000

# What the functions below read: by way, a dict for each round, or for each chain.
Rows = list[dict[str, Any]]


def sections(found: dict[str, Any]) -> Iterator[Section]:
    """A table for each part that was measured; `found`: as it is written to JSON."""
    for pool, ways in found.get("speed", {}).items():
        yield _speed(pool, ways, found["settings"])
    if "texts" in found:
        yield _texts(found["texts"])
    for text, ways in found.get("quality", {}).items():
        yield _quality(text, ways)


def _speed(pool: str, ways: dict[str, Rows], settings: dict[str, Any]) -> Section:
    rng, rows = np.random.default_rng(0), []
    exact = _rates(ways[_EXACT])
    for name, mine in ways.items():
        evaluation = sum(one["evaluation_s"] for one in mine)
        cells = [shown(_rates(mine), ".1f", np.median, rng)]
        cells.append("" if name == _EXACT else shown(100 * (_rates(mine) / exact - 1), "+.1f", np.median, rng))
        cells += [f"{_mean(mine, 'running'):.2f}", f"{_mean(mine, 'retracted'):.1f}"]
        cells += [
            f"{100 * value:.1f}" for value in (_mean(mine, "saved"), max(one["peak"] for one in mine), _ended(mine))
        ]
        cells.append(f"{100 * evaluation / sum(one['cpu_s'] for one in mine):.2f}")
        cells += [f"{np.median([one['step_ms'][place] for one in mine]):.1f}" for place in (0, 1)]
        rows.append([name, *cells])
    held = settings["room"] if pool == "small" else settings["requests"]
    title = (
        f"{settings['requests']} requests at once, {settings['length']} tokens of {settings['text']} each, in a pool "
        f"that holds {held:g}; percentile {settings['percentile']:g}, pages of {settings['page_size']}, "
        f"drafts {settings['drafts']}, {len(ways[_EXACT])} rounds"
    )
    columns = (
        "tokens/s [95 %]", "% to exact [95 %]", "requests that run", "retractions",
        "AMSR, mean over time, %", "peak", "at the end", "evaluation, % of CPU time", "a step, ms", "p99",
    )  # fmt: skip
    return Section(title, columns, rows)


def _rates(mine: Rows) -> np.ndarray:
    return np.array([one["tokens"] / one["seconds"] for one in mine])


def _mean(mine: Rows, name: str) -> float:
    return float(np.mean([one[name] for one in mine]))


def _ended(mine: Rows) -> float:
    return float(np.mean([amsr for one in mine for amsr in one["ended"]]))


def _texts(texts: dict[str, dict[str, float]]) -> Section:
    rows = []
    for name, kind in texts.items():
        cells = [f"{kind['chains']:g}", f"{kind['tokens']:.0f}", f"{kind['steps']:.1f}"]
        cells += [f"{100 * kind[name]:.0f}" for name in ("similar", "again")]
        rows.append([name, *cells, *(f"{100 * kind[name]:.1f}" for name in ("by_words", "by_both"))])
    columns = (
        "chains", "tokens", "steps", "similar steps (cosine > 0.8), %", "said before word by word, %",
        "pages that pass the filter of words, %", "both filters, %",
    )  # fmt: skip
    return Section("what the texts are like", columns, rows)


def _quality(text: str, ways: dict[str, Rows]) -> Section:
    rng, rows = np.random.default_rng(0), []
    exact = ways[_EXACT]
    asked = [place for place, one in enumerate(exact) if one["right"] is not None]
    for name, mine in ways.items():
        cells = [f"{100 * float(np.mean(_column(mine, 'amsr'))):.1f}"]
        if name == _EXACT:
            cells += ["", "", "", f"{np.mean(_column(mine, 'nll')):.3f}", ""]
        else:
            more = _column(mine, "nll") - _column(exact, "nll")
            tokens = np.concatenate([one["kl"] for one in mine])
            agree = np.array([100 * np.mean(one["agrees"]) for one in mine])
            cells += [
                shown(_kl(mine), ".4f", rng=rng),
                f"{np.percentile(tokens, 95):.4f}",
                shown(agree, ".1f", rng=rng),
            ]
            cells += [f"{np.mean(_column(mine, 'nll')):.3f}", shown(more, "+.4f", rng=rng)]
        rows.append([name, *cells, *_answers(mine, exact, asked, rng, name == _EXACT)])
    columns = (
        "AMSR, %", "KL to exact [95 %]", "KL, p95", "same likeliest token, % [95 %]", "NLL of the text", "more [95 %]",
        "right, %", "points [95 %]",
    )  # fmt: skip
    return Section(f"{len(exact)} chains of {text}, forced; {len(asked)} asked", columns, rows)


def _answers(mine: Rows, exact: Rows, asked: Sequence[int], rng: np.random.Generator, is_exact: bool) -> list[str]:
    if not asked:
        return ["", ""]
    right, before = (np.array([100.0 * rows[place]["right"] for place in asked]) for rows in (mine, exact))
    return [f"{right.mean():.1f}", "" if is_exact else shown(right - before, "+.1f", rng=rng)]


def _column(mine: Rows, name: str) -> np.ndarray:
    return np.array([one[name] for one in mine])


def _kl(mine: Rows) -> np.ndarray:
    """Mean KL of each chain's tokens, nats."""
    return np.array([np.mean(one["kl"]) for one in mine])


def plot(found: dict[str, Any], path: Path) -> None:
    """KL over AMSR, a line for each rotation through its percentiles, a panel for each text; and the throughput."""
    texts: dict[str, dict[str, Rows]] = found.get("quality", {})
    count = len(texts) + ("speed" in found)
    with drawing(path, (4.6 * count, 3.6), 1, count, squeeze=False) as grid:
        panels = iter(grid.flat)
        for text, ways in texts.items():
            axes = next(panels)
            for line in dict.fromkeys(name.partition(" ")[0] for name in ways if name != _EXACT):
                names = [name for name in ways if name.partition(" ")[0] == line]
                x = [100 * float(np.mean(_column(ways[name], "amsr"))) for name in names]
                axes.errorbar(x, *centred([_kl(ways[name]) for name in names]), marker="o", capsize=2, label=line)
            axes.set(title=text, xlabel="AMSR, %", ylabel="KL to exact decoding, nats a token")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
        if "speed" in found:
            _plot_speed(next(panels), found["speed"])


def _plot_speed(axes: Any, pools: dict[str, dict[str, Rows]]) -> None:
    for number, (pool, ways) in enumerate(pools.items()):
        exact, rng = _rates(ways[_EXACT]), np.random.default_rng(0)
        names = [name for name in ways if name != _EXACT]
        for place, name in enumerate(names):
            ratio = 100 * (_rates(ways[name]) / exact - 1)
            middle, (low, high) = float(np.median(ratio)), interval(ratio, rng, np.median)
            axes.bar(
                place + 0.4 * number, middle, 0.36, yerr=[[middle - low], [high - middle]], capsize=2,
                color=f"C{number}", label=f"{pool} pool" if not place else None,
            )  # fmt: skip
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set_xticks([place + 0.2 * (len(pools) - 1) for place in range(len(names))], names)
    axes.set(title="throughput", ylabel="tokens/s beside exact decoding, %")
    axes.legend(fontsize=8)
