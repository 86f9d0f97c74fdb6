"""The live display of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from loadgen.http.load import Load
from loadgen.http.tables import make_table

_RECENT = 200


@contextmanager
def live(load: Load, console: Console, title: str) -> Iterator[None]:
    """A display that is redrawn twice a second, while entered; none without a terminal."""
    if not console.is_terminal:
        yield
        return
    with Live(get_renderable=lambda: _status(load, title), console=console, refresh_per_second=2, transient=True):
        yield


def _status(load: Load, title: str) -> Table:
    """The run so far; medians are of the last requests, so that a long run costs no more to draw."""
    ended = [record for record in load.records if record.end_s]
    recent = [record for record in ended[-_RECENT:] if record.ok]
    seconds = load.now_s() if load.records else 0.0
    done = sum(record.ok for record in ended)
    since = min((record.sent_s for record in recent), default=seconds)
    rate = sum(record.output_tokens for record in recent) / max(seconds - since, 1e-3)
    columns = ("s", "sent", "running", "done", "failed", "output tok/s", "ttft p50 ms", "tpot p50 ms")
    counts = (f"{seconds:.0f}", f"{len(load.records)}", f"{load.running}", f"{done}", f"{len(ended) - done}")
    medians = (_median_ms([record.ttft_s for record in recent]), _median_ms([record.tpot_s for record in recent]))
    return make_table(title, columns, [(*counts, f"{rate:.0f}", *medians)], left=0)


def _median_ms(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{1000 * np.median(known):.0f}" if known else ""
