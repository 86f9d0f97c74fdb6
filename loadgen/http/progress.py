"""What one sees while a run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from loadgen.http.load import Load

_RECENT = 200


@contextmanager
def live(load: Load, console: Console, title: str) -> Iterator[None]:
    """A display that draws itself anew twice a second; none where nobody looks at a terminal."""
    if not console.is_terminal:
        yield
        return
    with Live(get_renderable=lambda: _status(load, title), console=console, refresh_per_second=2, transient=True):
        yield


def _status(load: Load, title: str) -> Table:
    """The run so far; percentiles over the last requests alone, so that drawing costs the same in a long run."""
    ended = [record for record in load.records if record.end_s]
    recent = [record for record in ended[-_RECENT:] if record.ok]
    table = Table(title=title)
    for column in ("s", "sent", "running", "done", "failed", "output tok/s", "ttft p50 ms", "tpot p50 ms"):
        table.add_column(column, justify="right")
    seconds = load.now_s() if load.records else 0.0
    done = sum(record.ok for record in ended)
    since = min((record.sent_s for record in recent), default=seconds)
    rate = sum(record.output_tokens for record in recent) / max(seconds - since, 1e-3)
    table.add_row(
        f"{seconds:.0f}",
        f"{len(load.records)}",
        f"{load.running}",
        f"{done}",
        f"{len(ended) - done}",
        f"{rate:.0f}",
        _median_ms([record.ttft_s for record in recent]),
        _median_ms([record.tpot_s for record in recent]),
    )
    return table


def _median_ms(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{1000 * np.median(known):.0f}" if known else ""
