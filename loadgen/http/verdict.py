"""Sentences with which a report begins: how fast a run was, how much slower than another one, and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.http.record import Record
from loadgen.http.summary import hit_ratio, latencies, span_s

# Differences below these are no causes: of hit ratios, and of a part's share in the difference of times.
_POINTS, _SHARE = 0.05, 0.3


def of_run(records: Sequence[Record]) -> str:
    """A run in a sentence."""
    good, first = [r for r in records if r.ok], latencies(records)["ttft"]
    if not good or not first:
        return f"None of {len(records)} requests was answered."
    half, most = (1000 * float(np.percentile(first, point)) for point in (50, 99))
    said = f"Half of the requests had their first token within {half:,.0f} ms, 99 % within {most:,.0f} ms"
    said += f"; {_speed(records):,.0f} output tokens/s"
    if (hits := hit_ratio(good)) is not None:
        said += f"; {hits:.0%} of the prompt tokens came from the cache"
    if failed := len(records) - len(good):
        said += f"; {failed} of {len(records)} requests failed"
    return said + "."


def beside(name: str, mine: Sequence[Record], base_name: str, base: Sequence[Record]) -> str:
    """A run beside another one in a sentence: the time to the first token, its cause, and the throughput."""
    times, other = latencies(mine)["ttft"], latencies(base)["ttft"]
    if not times or not other:
        return f"{name} and {base_name} cannot be compared: one of them has no answers."
    ratio = float(np.median(times) / max(np.median(other), 1e-9))
    speed = _speed(mine) / max(_speed(base), 1e-9)
    if 0.95 < ratio < 1.05:
        said = f"{name} is as quick to the first token as {base_name}"
    else:
        how = f"{max(ratio, 1 / ratio):.1f} times {'slower' if ratio > 1 else 'faster'}"
        said = f"{name} is {how} to the first token than {base_name}"
        said += _because(mine, base, float(np.median(times) - np.median(other)))
    return f"{said}; it has {speed:.2f} times the output tokens/s."


def cold_s(records: Sequence[Record]) -> float | None:
    """Seconds until the first answer whose prompt came from the cache at least in part; None if it is not told."""
    told = [r for r in records if r.ok and r.cached_tokens is not None]
    warm = [r.scheduled_s for r in told if r.cached_tokens]
    return min(warm) if warm else None


def _because(mine: Sequence[Record], base: Sequence[Record], difference_s: float) -> str:
    hits, other = hit_ratio(mine), hit_ratio(base)
    if hits is not None and other is not None and abs(hits - other) > _POINTS and (hits < other) == (difference_s > 0):
        return f", because {hits:.0%} of its prompt tokens came from the cache, and {other:.0%} of the other's"
    for kind, words in (("queue", "its requests waited"), ("prefill", "its prompts were computed for")):
        here, there = latencies(mine)[kind], latencies(base)[kind]
        if here and there and (np.median(here) - np.median(there)) / difference_s > _SHARE:
            return f", because {words} {1000 * np.median(here):,.0f} ms, and the other's {1000 * np.median(there):,.0f}"
    return ""


def _speed(records: Sequence[Record]) -> float:
    return sum(r.output_tokens for r in records if r.ok) / max(span_s(records), 1e-9)
