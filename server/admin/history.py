"""The figures behind the page's charts, which show the last hour."""

import time

from runtime.calls import State
from server.http.answers import JsonObject
from server.http.context import Context
from server.telemetry.metrics import Metrics

EVERY_S = 5.0
MOST = int(3600 / EVERY_S)
# Gauges and counters that a sample takes from the engine's state.
_COUNTED = ("running", "waiting", "pages_total", "pages_free", "pages_tree", "pages_private", "pages_locked",
            "pages_pinned", "pages_held", "tree_nodes", "queried_tokens", "cached_tokens", "substituted_pages",
            "saved_pages")  # fmt: skip


def sample(state: State, context: Context, metrics: Metrics) -> JsonObject:
    """Current figures of the engine's state and the metrics; pages, tokens, seconds."""
    labelled = state.labelled
    evicted = labelled["evicted_tokens_by_tenant"]
    by_tenant = {context.tenant_name(account): tokens for account, tokens in evicted.items()}
    recent = {name: value if value is None else round(value, 4) for name, value in metrics.now().items()}
    counted = {name: state.figures.get(name, 0) for name in _COUNTED}
    return {
        "at_s": round(time.time(), 1),
        **counted,
        "evicted_tokens_by_cause": labelled["evicted_tokens_by_cause"],
        "evicted_tokens_by_tenant": by_tenant,
        "missed_tokens_by_reason": labelled["missed_tokens_by_reason"],
        "tiers": state.tiers,
        "loaded_tokens_by_tier": labelled.get("loaded_tokens_by_tier", {}),
        **recent,
    }
