"""When a device computes and when it waits for the host, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from loadgen.gpu.records import Figures


def profile_gaps(work: Callable[[], object], device: str) -> Figures:
    """Share of the time, from its first operation to its last, for which the device computes, and its longest rest.

    On a CPU, to try it, torch's operations stand for the device's.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        work()
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type == kind and not event.is_user_annotation
    ]
    busy_us, rests_us = busy_and_rests(spans)
    return {
        "device busy, %": 100 * busy_us / (busy_us + sum(rests_us)),
        "longest rest, ms": max(rests_us, default=0.0) / 1e3,
    }


def busy_and_rests(spans: Iterable[tuple[float, float]]) -> tuple[float, list[float]]:
    """For how long at least one of some spans (start, end) lasts, and how long each rest between them is."""
    busy, rests, until = 0.0, [], None
    for start, end in sorted(spans):
        if until is not None and start > until:
            rests.append(start - until)
        busy += max(end - (start if until is None else max(start, until)), 0.0)
        until = end if until is None else max(until, end)
    return busy, rests
