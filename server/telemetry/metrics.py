"""Prometheus metrics. SGLang's and vLLM's names are used if they have the metric."""

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from radix.stats import Histogram
from runtime.calls import State
from runtime.features.registry import FEATURES
from runtime.frontend.output import Output
from server.telemetry.rates import Recent

_TOKENS = tuple(scale * 10**power for power in range(6) for scale in (1, 2, 5))
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)

# Field of the engine's state -> (metric names, help). The client library appends `_total` to counters.
_COUNTERS = {
    "prompt_tokens": ("sglang:prompt_tokens vllm:prompt_tokens", "Prompt tokens of accepted requests"),
    "generation_tokens": ("sglang:generation_tokens vllm:generation_tokens", "Generated tokens"),
    "cached_tokens": (
        "sglang:cached_tokens vllm:prefix_cache_hits vllm:prompt_tokens_cached",
        "Prompt tokens read from the cache",
    ),
    "queries": ("ramet:prefix_cache_requests", "Requests looked up in the cache"),
    "hits": ("ramet:prefix_cache_request_hits", "Requests that read tokens from the cache"),
    "queried_tokens": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache"),
    "evicted_tokens": ("sglang:evicted_tokens", "Tokens evicted from the cache"),
    "requests": ("sglang:num_requests", "Accepted requests"),
    "aborted_requests": ("sglang:num_aborted_requests", "Requests ended by an abort"),
    "failed_requests": ("ramet:failed_requests", "Requests that ended with an error"),
    "failed_steps": ("ramet:failed_steps", "Steps that failed and were repeated in parts"),
    "bad_logits": ("ramet:bad_logits", "Requests whose logits were NaN or infinite"),
    "retracted_requests": ("vllm:num_preemptions", "Requests that were retracted for lack of pages"),
    "pins_refused": ("ramet:pins_refused", "Pins refused because of the budget"),
    "pins_broken": ("ramet:pins_broken", "Pins removed for the pages of a live request"),
    "keeps_refused": ("ramet:keeps_refused", "Prefixes that could not be kept for the requested time"),
    "keeps_broken": ("ramet:keeps_broken", "Kept prefixes removed before their time was over"),
    "held_pages_lost": ("ramet:held_pages_lost", "Pages that lost their hold early, because of the budget"),
    "held_pages_broken": ("ramet:held_pages_broken", "Held pages evicted, because nothing else was left"),
    "steps": ("ramet:steps", "Engine steps"),
    "overlapped_steps": ("ramet:overlapped_steps", "Steps that began before the tokens of the step before were read"),
    "prefill_tokens": ("ramet:prefill_tokens", "Token rows computed by prefill"),
}
_GAUGES = {
    "paused": ("ramet:paused", "Whether the engine is paused"),
    "running": ("sglang:num_running_reqs vllm:num_requests_running", "Running requests"),
    "waiting": ("sglang:num_queue_reqs vllm:num_requests_waiting", "Waiting requests"),
    "retracted_requests": ("sglang:num_retracted_reqs", "Requests retracted for lack of pages, since start"),
    "throughput": ("sglang:gen_throughput", "Generated tokens per second over the last seconds"),
    "usage": ("sglang:token_usage vllm:kv_cache_usage_perc", "Share of the pool that live requests hold"),
    "hit_rate": ("sglang:cache_hit_rate", "Cached share of all prompt tokens since start"),
    "pages_free": ("ramet:pages_free", "Free pages"),
    "pages_tree": ("ramet:pages_tree", "Pages held by the tree"),
    "pages_private": ("ramet:pages_private", "Pages private to live requests"),
    "pages_locked": ("ramet:pages_locked", "Pages of the tree that live requests use, without pinned pages"),
    "pages_pinned": ("ramet:pages_pinned", "Pinned pages of the tree"),
    "pages_held": ("ramet:pages_held", "Pages of the tree that are held, or kept by breakpoints, without pinned pages"),
    "pins": ("ramet:pins", "Pins"),
    "keeps": ("ramet:keeps", "Prefixes that tenants keep for a time"),
    "tree_nodes": ("ramet:tree_nodes", "Nodes of the tree"),
    "connections": ("ramet:connections", "Open connections, including this one"),
}
for _feature in FEATURES:
    _COUNTERS |= _feature.counters
    _GAUGES |= _feature.gauges
# Histograms of the engine (ages of pages in seconds, steps in tokens) and of this process.
_HISTOGRAMS = {
    "idle_before_evict_s": (
        "vllm:kv_block_idle_before_evict_seconds",
        "Seconds from a page's last use to its eviction",
    ),
    "lifetime_s": ("vllm:kv_block_lifetime_seconds", "Seconds from a page's insertion to its eviction"),
    "step_rows": ("vllm:iteration_tokens_total", "Token rows of a step"),
    "reuse_gap_s": ("vllm:kv_block_reuse_gap_seconds", "Seconds between two uses of a prefix"),
    "ttft": ("sglang:time_to_first_token_seconds vllm:time_to_first_token_seconds", "Seconds to the first token"),
    "itl": ("sglang:inter_token_latency_seconds vllm:inter_token_latency_seconds", "Seconds between output tokens"),
    "e2e": (
        "sglang:e2e_request_latency_seconds vllm:e2e_request_latency_seconds",
        "Seconds from submission to the end",
    ),
    "queue": ("sglang:queue_time_seconds vllm:request_queue_time_seconds", "Seconds in the waiting queue"),
    "prefill": ("vllm:request_prefill_time_seconds", "Seconds from admission to the first token"),
    "decode": ("vllm:request_decode_time_seconds", "Seconds from the first token to the end"),
    "tpot": ("vllm:request_time_per_output_token_seconds", "Seconds per output token after the first"),
    "prompt": ("vllm:request_prompt_tokens", "Prompt tokens of a request"),
    "generation": ("vllm:request_generation_tokens", "Generated tokens of a completion"),
}
# Histograms of this process, with their bucket bounds.
_OBSERVED = {
    **dict.fromkeys(("ttft", "itl", "e2e", "queue", "prefill", "decode", "tpot"), _SECONDS),
    **dict.fromkeys(("prompt", "generation"), _TOKENS),
}
# Events of tiers whose series exist from the start.
_TIER_EVENTS = ("hits", "misses", "written", "failed", "dropped")


class Metrics:
    """The metrics registry of a server."""

    def __init__(self, model: str):
        self._labels = {"model_name": model}
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._state = State()
        self._generated = Recent(window_s=10)
        self._ttfts = Recent(window_s=30)
        self._registry.register(self)
        self._observed = {key: Histogram(bounds) for key, bounds in _OBSERVED.items()}
        self._http = Counter("http_requests", "HTTP requests", ["handler", "method", "status"], registry=self._registry)
        self._success = Counter(
            "vllm:request_success", "Finished requests", [*self._labels, "finished_reason"], registry=self._registry
        )

    def count_request(self, method: str, path: str, status: int) -> None:
        """Count an HTTP request. `path` is the route's template, so that clients cannot create labels."""
        known = method if method in _METHODS else "other"
        self._http.labels(handler=path, method=known, status=f"{status // 100}xx").inc()

    def observe(self, output: Output, previous_s: float | None) -> None:
        """Record an Output; `previous_s`: `e2e_s` of the completion's last Output with tokens, None at the first."""
        new, observed = len(output.new_token_ids), self._observed
        self._generated.add(new)
        if new and previous_s is None:
            observed["ttft"].add(output.e2e_s)
            self._ttfts.add(output.e2e_s)
            observed["queue"].add(output.queue_s)
            observed["prefill"].add(output.prefill_s)
        elif new and previous_s is not None:
            observed["itl"].add((output.e2e_s - previous_s) / new, times=new)
        if output.finish is None:
            return
        observed["generation"].add(output.completion_tokens)
        if output.choice == 0:
            observed["prompt"].add(output.prompt_tokens)
        decode_s = max(output.e2e_s - output.queue_s - output.prefill_s, 0.0)
        observed["e2e"].add(output.e2e_s)
        observed["decode"].add(decode_s)
        if output.completion_tokens > 1:
            observed["tpot"].add(decode_s / (output.completion_tokens - 1))
        self._success.labels(**self._labels, finished_reason=output.finish.type).inc()

    def now(self) -> dict[str, float | None]:
        """Recent generated tokens per second, and recent percentiles of the time to first token in seconds."""
        return {
            "tokens_per_s": self._generated.per_second(),
            "ttft_p50_s": self._ttfts.percentile(50),
            "ttft_p95_s": self._ttfts.percentile(95),
        }

    def render(self, state: State, connections: int, adapters: Mapping[str, str]) -> bytes:
        """The exposition text; `state`: the engine's, to which figures are added; `adapters`: digests by name."""
        queried, used = state["queried_tokens"], state["pages_private"] + state["pages_locked"]
        state.figures |= {
            "connections": connections,
            "usage": used / state["pages_total"],
            "throughput": self._generated.per_second(),
            "hit_rate": state["cached_tokens"] / queried if queried else 0.0,
        }
        state.histograms |= self._observed
        by_digest = state.labelled["requests_by_adapter"]
        state.labelled["requests_by_adapter"] = {name: by_digest.get(digest, 0) for name, digest in adapters.items()}
        self._state = state
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's state as metrics. Called by the registry during `render`."""
        for table, family in ((_COUNTERS, CounterMetricFamily), (_GAUGES, GaugeMetricFamily)):
            for key, (names, text) in table.items():
                for name in names.split():
                    yield self._metric(family, name, text, {(): self._state.figures.get(key, 0)})
        for key, (names, text) in _HISTOGRAMS.items():
            yield from (self._histogram(name, text, self._state.histograms[key]) for name in names.split())
        yield from self._labelled(self._state)

    def _labelled(self, state: State) -> Iterator[Metric]:
        """Metrics with further labels. Without tiers, the metrics of tiers have no samples."""
        tiers, labelled = state.tiers, state.labelled
        events = {
            (name, event): count
            for name, tier in tiers.items()
            for event, count in {**dict.fromkeys(_TIER_EVENTS, 0), **tier.counts}.items()
        }
        waiting = {"capacity": state["waiting"] - state["blocked"], "deferred": state["blocked"]}
        counters = (
            ("ramet:evicted_tokens", "Tokens evicted from the cache", labelled["evicted_tokens_by_cause"], "cause"),
            ("ramet:adapter_requests", "Requests of an adapter", labelled["requests_by_adapter"], "adapter"),
            (
                "ramet:tier_loaded_tokens",
                "Tokens loaded from a tier",
                labelled.get("loaded_tokens_by_tier", {}),
                "tier",
            ),
            ("ramet:tier_blocks", "Blocks of a tier, by event", events, "tier", "event"),
        )
        gauges = (
            ("ramet:tier_stored_bytes", "Bytes in a tier", {name: tier.bytes for name, tier in tiers.items()}, "tier"),
            (
                "ramet:tier_open",
                "0 for a failed tier, else 1",
                {name: tier.open for name, tier in tiers.items()},
                "tier",
            ),
            ("vllm:num_requests_waiting_by_reason", "Waiting requests by reason", waiting, "reason"),
        )
        for family, rows in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
            for name, text, values, *labels in rows:
                yield self._metric(family, name, text, values, *labels)

    def _metric(
        self,
        family: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        values: Mapping[str, float] | Mapping[tuple[()], float] | Mapping[tuple[str, str], float],
        *labels: str,
    ) -> Metric:
        """A metric with the model's name and further labels; `values`: by label value, or by tuple of label values."""
        metric = family(name, text, labels=[*self._labels, *labels])
        for own, value in values.items():
            several = (own,) if isinstance(own, str) else own
            metric.add_metric([*self._labels.values(), *several], value)
        return metric

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        buckets = zip(map(floatToGoString, [*histogram.bounds, math.inf]), accumulate(histogram.counts), strict=True)
        family.add_metric(list(self._labels.values()), list(buckets), histogram.total)
        return family
