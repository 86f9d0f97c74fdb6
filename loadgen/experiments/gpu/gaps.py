"""Busy time and gaps of a device, by torch's profiler."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def profile_gaps(work: Callable[[], object], device: str) -> dict[str, Any]:
    """Busy share of the time between the device's first and last operation, and its longest rest; empty without any.

    If the profiler fails, `profiler` says why: what was measured before is worth keeping.

    On a CPU, for a trial, torch's operations stand for the device's.
    """
    cuda = device == "cuda"
    try:
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
            work()
    except (AssertionError, RuntimeError) as error:
        return {"profiler": str(error)}
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type == kind and not event.is_user_annotation
    ]
    if not spans:
        return {}
    busy_us, rests_us = busy_and_rests(spans)
    return {"busy": busy_us / (busy_us + sum(rests_us)), "rest": max(rests_us, default=0.0) / 1e6}


def busy_and_rests(spans: Iterable[tuple[float, float]]) -> tuple[float, list[float]]:
    """Length of the union of some spans (start, end), and the length of each gap between them."""
    busy, rests, until = 0.0, [], None
    for start, end in sorted(spans):
        if until is not None and start > until:
            rests.append(start - until)
        busy += max(end - (start if until is None else max(start, until)), 0.0)
        until = end if until is None else max(until, end)
    return busy, rests
