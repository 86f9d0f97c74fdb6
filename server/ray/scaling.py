"""Number of replicas by what waits and by the time to first token."""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingContext


class QueueAndFirstToken:
    """Serve's policy by calls under way, and one replica more while the first token comes late.

    Args:
        target_ongoing: calls under way and waiting, a replica.
        target_ttft_s: bound on the mean time to first token of the slowest replica.
    """

    def __init__(self, target_ongoing: float, target_ttft_s: float):
        self._target_ongoing = target_ongoing
        self._target_ttft_s = target_ttft_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, within the configured bounds, and no state."""
        wanted = math.ceil(context.total_num_requests / self._target_ongoing)
        times = (context.aggregated_metrics or {}).get("ttft_s", {})
        if max(times.values(), default=0.0) > self._target_ttft_s:
            wanted = max(wanted, context.current_num_replicas + 1)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(wanted, low), high), {}
