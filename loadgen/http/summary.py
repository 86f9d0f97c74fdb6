"""The figures of a run, from its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from loadgen.http.record import Record
from loadgen.http.slo import Slo

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Level:
    """A run of a sweep: its load (users, or sessions per second) and its summary; `held`: it kept the service level."""

    load: float
    summary: dict[str, Any]
    held: bool


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (linear between the nearest ranks, numpy's default) and maximum; None of no values."""
    if not len(values):
        return None
    array = np.asarray(values, dtype=float)
    points = np.percentile(array, PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, points, strict=True)}
    return {"mean": float(array.mean()), **named, "max": float(array.max())}


def latencies(records: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds by kind, of complete answers: one ITL for each gap, one of the others for each request."""
    good = [record for record in records if record.ok]
    kinds: dict[str, list[float | None]] = {
        "ttft": [r.ttft_s for r in good],
        "tpot": [r.tpot_s for r in good],
        "itl": list(chain.from_iterable(r.itl_s for r in good)),
        "e2e": [r.e2e_s for r in good],
        "queue": [r.queue_s for r in good],
        "prefill": [r.prefill_s for r in good],
    }
    return {kind: [value for value in values if value is not None] for kind, values in kinds.items()}


def span_s(records: Sequence[Record]) -> float:
    """Seconds from the first scheduled time to the last end."""
    return max(r.end_s for r in records) - min(r.scheduled_s for r in records) if records else 0.0


def hit_ratio(records: Sequence[Record]) -> float | None:
    """Cached share of prompt tokens, over the requests for which the server reports it; None if it never does."""
    told = [r for r in records if r.cached_tokens is not None and r.prompt_tokens]
    asked = sum(r.prompt_tokens or 0 for r in told)
    return sum(r.cached_tokens or 0 for r in told) / asked if asked else None


def summarise(records: Sequence[Record], slo: Slo | None = None) -> dict[str, Any]:
    """All figures as JSON data; times in seconds, throughput per second of the records' span."""
    good = [record for record in records if record.ok]
    seconds = span_s(records)
    inputs, outputs = sum(r.prompt_tokens or 0 for r in good), sum(r.output_tokens for r in good)

    def per_second(amount: float) -> float:
        return amount / seconds if seconds > 0 else 0.0

    summary: dict[str, Any] = {
        "requests": len(records),
        "completed": len(good),
        "errors": dict(Counter(r.error for r in records if r.error is not None)),
        "seconds": seconds,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "output_tokens_counted_by": sorted({r.counted_by for r in good}),
        # Answers of another length than wanted: the server knows no ignore_eos, or the context was full.
        "wrong_length": sum(r.wanted_tokens not in (None, r.output_tokens) for r in good),
        "cached_tokens": sum(r.cached_tokens or 0 for r in good),
        "hit_ratio": hit_ratio(good),
        "request_throughput": per_second(len(good)),
        "input_throughput": per_second(inputs),
        "output_throughput": per_second(outputs),
        "total_throughput": per_second(inputs + outputs),
        "mean_concurrency": per_second(sum(r.end_s - r.sent_s for r in records)),
        "sent_late": spread([r.sent_s - r.scheduled_s for r in records]),
        "latency": {kind: found for kind, values in latencies(records).items() if (found := spread(values))},
    }
    if slo is not None:
        kept = sum(map(slo.kept_by, records))
        summary["goodput"] = {
            "slo_s": slo.bounds_s,
            "requests": kept,
            "share": kept / len(records) if records else 0.0,
            "request_throughput": per_second(kept),
        }
    return summary
