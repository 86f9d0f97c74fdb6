"""The figures of a run, from its records."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from loadgen.http.record import UNFINISHED, Record
from loadgen.http.slo import Slo

_PERCENTILES = (50, 90, 95, 99)
POINTS = ("mean", *(f"p{point}" for point in _PERCENTILES), "max")


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (numpy's default interpolation) and maximum; None without values."""
    if not len(values):
        return None
    array = np.asarray(values, dtype=float)
    found = (array.mean(), *np.percentile(array, _PERCENTILES), array.max())
    return dict(zip(POINTS, map(float, found), strict=True))


def latencies(records: Sequence[Record]) -> dict[str, list[float]]:
    """Latencies of complete answers in seconds, by kind: an ITL for each gap, one other value for each request."""
    good = [record for record in records if record.ok]
    kinds: dict[str, list[float | None]] = {
        "ttft": [r.ttft_s for r in good],
        "tpot": [r.tpot_s for r in good],
        "itl": list(chain.from_iterable(r.itl_s for r in good)),
        "e2e": [r.e2e_s for r in good],
        "queue": [r.queue_s for r in good],
        "prefill": [r.prefill_s for r in good],
        "sent_late": [r.sent_s - r.scheduled_s for r in records],
    }
    return {kind: [round(value, 6) for value in values if value is not None] for kind, values in kinds.items()}


def hit_ratio(records: Sequence[Record]) -> float | None:
    """Cached share of prompt tokens, over the requests for which the server reports it; None if it never does."""
    told = [r for r in records if r.cached_tokens is not None and r.prompt_tokens]
    asked = sum(r.prompt_tokens or 0 for r in told)
    return sum(r.cached_tokens or 0 for r in told) / asked if asked else None


def before_prefix(records: Sequence[Record]) -> int:
    """Complete requests that were sent before any answer behind their shared prefix had begun."""
    begun_s: dict[str, float] = {}
    for record in records:
        if record.group and record.first_s is not None:
            begun_s[record.group] = min(begun_s.get(record.group, record.first_s), record.first_s)
    return sum(r.ok and r.group in begun_s and r.sent_s < begun_s[r.group] for r in records)


def summarise(records: Sequence[Record], slo: Slo | None = None) -> dict[str, Any]:
    """All figures as JSON data: a list for each kind of latency, in seconds; throughput per second of the whole run."""
    good = [record for record in records if record.ok]
    failed = [record for record in records if record.error not in (None, UNFINISHED)]
    seconds = max(r.end_s for r in records) - min(r.scheduled_s for r in records) if records else 0.0
    inputs, outputs = sum(r.prompt_tokens or 0 for r in good), sum(r.output_tokens for r in good)

    def per_second(amount: float) -> float:
        return amount / seconds if seconds > 0 else 0.0

    summary: dict[str, Any] = {
        "count": len(records),
        "completed": len(good),
        "failed": len(failed),
        "unfinished": len(records) - len(good) - len(failed),
        "errors": dict(Counter(r.error for r in failed)),
        "error_examples": {r.error: r.message for r in reversed(failed)},
        "seconds": seconds,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "output_tokens_counted_by": sorted({r.counted_by for r in good}),
        # Answers of another length than requested: the server lacks ignore_eos, or the context was full.
        "wrong_length": sum(r.wanted_tokens not in (None, r.output_tokens) for r in good),
        "hit_ratio": hit_ratio(good),
        "request_throughput": per_second(len(good)),
        "input_throughput": per_second(inputs),
        "output_throughput": per_second(outputs),
        "mean_concurrency": per_second(sum(r.end_s - r.sent_s for r in records)),
        **latencies(records),
    }
    if slo is not None:
        kept = sum(map(slo.kept_by, records))
        summary |= {"goodput": kept / len(records) if records else 0.0, "goodput_throughput": per_second(kept)}
    return summary
