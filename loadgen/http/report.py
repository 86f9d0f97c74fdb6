"""The report of a run: figures and plots in one self-contained HTML file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rich.table import Table

from loadgen.http.plots import run_figures, svg
from loadgen.http.record import Record
from loadgen.http.run import Result
from loadgen.http.run_tables import figure_table, latency_table, warnings
from loadgen.http.verdict import of_run

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem 2rem; color: #1c1c1c;
  background: #fff }
h1 { font-size: 1.35rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .15rem .7rem; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left } .warning { background: #fff3d6; padding: .4rem .7rem }
svg { width: 100%; height: auto } .plots { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(34rem, 100%), 1fr)) } .verdict { font-size: 1.15rem }
pre { background: #f4f4f4; padding: .7rem; overflow-x: auto; font-size: 12px }
"""


def write_report(path: Path, title: str, result: Result) -> None:
    """Write the report; plots show every request, figures only the counted ones."""
    path.write_text(_page(title, result), encoding="utf-8")


def _page(title: str, result: Result) -> str:
    plots = plots_of(result.records)
    warned = "".join(f'<p class="warning">{escape(text)}</p>\n' for text in warnings(result))
    facts = escape(json.dumps(result.facts, indent=1, default=str))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}</title><style>{_STYLE}</style></head>
<body>
<h1>{escape(title)}</h1>
<p class="verdict">{escape(of_run(result.records))}</p>
<p>{escape(result.facts["started_at"])}, {escape(result.facts["client"]["machine"])}</p>
{warned}{_html(latency_table(result.summary))}
<h2>Figures</h2>
{_html(figure_table(result))}
<div class="plots">{plots}</div><h2>Settings</h2>
<pre>{facts}</pre>
</body></html>
"""


def plots_of(records: Sequence[Record]) -> str:
    """The plots of a run, each with its title."""
    plots = run_figures(records).items()
    return "".join(f"<div><h2>{escape(name)}</h2>\n{svg(plot)}</div>\n" for name, plot in plots)


def write_comparison(path: Path, verdicts: Sequence[str], table: Table, runs: Mapping[str, Sequence[Record]]) -> None:
    """Write a comparison: its verdicts, its table, and the plots of all runs."""
    plots = "".join(
        f'<h1>{escape(name)}</h1><div class="plots">{plots_of(records)}</div>' for name, records in runs.items()
    )
    said = "".join(f'<p class="verdict">{escape(verdict)}</p>\n' for verdict in verdicts)
    path.write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>Comparison</title>'
        f"<style>{_STYLE}</style></head><body>\n{said}<p>{escape(str(table.title))}</p>\n"
        f"{_html(table)}\n{plots}</body></html>\n",
        encoding="utf-8",
    )


def _html(table: Table) -> str:
    """A table of the terminal in HTML."""
    head = "".join(f"<th>{escape(str(column.header))}</th>" for column in table.columns)
    lines = zip(*(column.cells for column in table.columns), strict=True)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in line)}</tr>\n" for line in lines)
    return f"<table><tr>{head}</tr>\n{rows}</table>"
