"""The report of a run: figures and plots in one self-contained HTML file."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from loadgen.http.plots import run_figures, svg
from loadgen.http.run import Result
from loadgen.http.run_tables import figures, warnings
from loadgen.http.summary import PERCENTILES

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c;
  background: #fff }
h1 { font-size: 1.35rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .15rem .7rem; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left } .warning { background: #fff3d6; padding: .4rem .7rem }
svg { max-width: 100%; height: auto } pre { background: #f4f4f4; padding: .7rem; overflow-x: auto; font-size: 12px }
"""


def write_report(path: Path, title: str, result: Result) -> None:
    """Write the report; plots show every request, figures only the counted ones."""
    path.write_text(_page(title, result), encoding="utf-8")


def _page(title: str, result: Result) -> str:
    plots = "".join(f"<h2>{escape(name)}</h2>\n{svg(plot)}\n" for name, plot in run_figures(result.records).items())
    warned = "".join(f'<p class="warning">{escape(text)}</p>\n' for text in warnings(result))
    facts = escape(json.dumps(result.facts, indent=1, default=str))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}</title><style>{_STYLE}</style></head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(result.facts["started_at"])}, {escape(result.facts["client"]["machine"])}</p>
{warned}{_latency_table(result)}
<h2>Figures</h2>
{_figure_table(result)}
{plots}<h2>Settings</h2>
<pre>{facts}</pre>
</body></html>
"""


def _latency_table(result: Result) -> str:
    points = ["mean", *(f"p{p}" for p in PERCENTILES), "max"]
    head = "".join(f"<th>{point}</th>" for point in points)
    rows = "".join(
        f"<tr><td>{kind.upper()}</td>{''.join(f'<td>{1000 * values[point]:.1f}</td>' for point in points)}</tr>\n"
        for kind, values in result.summary["latency"].items()
    )
    return f"<table><tr><th>milliseconds</th>{head}</tr>\n{rows}</table>"


def _figure_table(result: Result) -> str:
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>\n" for k, v in figures(result).items())
    return f"<table>{rows}</table>"
