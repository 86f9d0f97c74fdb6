"""Which kernels of the device, and which calls on the host, some work spends its time on, by torch's profiler."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Most kernels and calls of the host that are kept, and most characters of their names.
_KERNELS, _CALLS, _NAME = 20, 12, 200


def profile_kernels(work: Callable[[], object], device: str, steps: int) -> dict[str, Any]:
    """Times of each of some steps: of all kernels and of all calls in seconds, and of the longest ones by name.

    `kernels` and `calls` are lists of `name`, `us` and `count`. On a CPU, for a trial, torch's operations stand for the
    device's kernels.

    Args:
        work: runs these steps.

    Raises:
        RuntimeError: if the profiler sees no kernel.
    """
    cuda, activities = device == "cuda", [ProfilerActivity.CPU]
    if cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        work()
    events = [event for event in profiled.events() if not event.is_user_annotation]
    calls = [(one.name, one.self_cpu_time_total) for one in events if one.device_type == DeviceType.CPU]
    kernels = [(one.name, one.time_range.elapsed_us()) for one in events if one.device_type == DeviceType.CUDA]
    kernels = kernels if cuda else calls
    if not kernels:
        raise RuntimeError("torch's profiler saw no kernel of the device")
    return {
        "kernel_s": sum(us for _, us in kernels) / steps / 1e6, "host_s": sum(us for _, us in calls) / steps / 1e6,
        "kernels": longest(kernels, steps, _KERNELS), "calls": longest(calls, steps, _CALLS),
    }  # fmt: skip


def longest(pieces: Iterable[tuple[str, float]], steps: int, most: int) -> list[dict[str, Any]]:
    """Sums of (name, microseconds) by name, for each of some steps, the longest first."""
    found: dict[str, dict[str, Any]] = {}
    for name, us in pieces:
        one = found.setdefault(name, {"name": name[:_NAME], "us": 0.0, "count": 0.0})
        one["us"] += us / steps
        one["count"] += 1 / steps
    return sorted(found.values(), key=lambda one: -one["us"])[:most]
