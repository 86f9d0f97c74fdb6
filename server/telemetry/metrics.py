"""Prometheus metrics, under the names of SGLang's and vLLM's dashboards where these have one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from radix.stats import Histogram
from runtime.frontend.output import Output
from server.telemetry.rates import Rate, Recent

_TOKENS = tuple(scale * 10**power for power in range(6) for scale in (1, 2, 5))
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)

# Engine state -> (help, names); the client library adds `_total` to counters.
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_tokens": ("Prompt tokens of accepted requests", ("sglang:prompt_tokens", "vllm:prompt_tokens")),
    "generation_tokens": ("Generated tokens", ("sglang:generation_tokens", "vllm:generation_tokens")),
    "cached_tokens": (
        "Prompt tokens read from the cache",
        ("sglang:cached_tokens", "vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits", "vllm:prompt_tokens_cached"),
    ),
    "queries": ("Requests looked up in the cache", ("ramet:prefix_cache_requests",)),
    "hits": ("Requests that found something in the cache", ("ramet:prefix_cache_request_hits",)),
    "queried_tokens": (
        "Prompt tokens looked up in the cache",
        ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    ),
    "evicted_tokens": ("Tokens evicted from the cache", ("sglang:evicted_tokens",)),
    "requests": ("Accepted requests", ("sglang:num_requests",)),
    "aborted_requests": ("Requests ended by an abort", ("sglang:num_aborted_requests",)),
    "failed_requests": ("Requests that ended with an error", ("ramet:failed_requests",)),
    "failed_steps": ("Steps that failed and were run again in parts", ("ramet:failed_steps",)),
    "bad_logits": ("Requests whose logits were no numbers", ("ramet:bad_logits",)),
    "retracted_requests": ("Requests that gave up their pages", ("vllm:num_preemptions",)),
    "pins_refused": ("Pins refused over the budget", ("ramet:pins_refused",)),
    "pins_broken": ("Pins that yielded to a live request", ("ramet:pins_broken",)),
    "keeps_refused": ("Prefixes that were to be kept for a time and are not", ("ramet:keeps_refused",)),
    "keeps_broken": ("Kept prefixes that yielded before their time was over", ("ramet:keeps_broken",)),
    "steps": ("Engine steps", ("ramet:steps",)),
    "denoise_steps": ("Denoising steps of all requests", ("ramet:denoise_steps",)),
    "refreshes": ("Denoising steps that refreshed a shared prefix", ("ramet:prefix_refreshes",)),
    "encoded_prefixes": ("Shared prefixes encoded for a diffusion model", ("ramet:encoded_prefixes",)),
    "divergences": ("Measurements of the reuse of prefixes that requests were served with", ("ramet:divergences",)),
    "divergences_exceeded": ("Measurements that exceeded the bound", ("ramet:divergences_exceeded",)),
    "encoded_modules": ("Prompt modules encoded", ("ramet:encoded_modules",)),
    "encoded_documents": ("Chunks of documents encoded", ("ramet:encoded_documents",)),
    "fused_rows": ("Rows of documents that were chosen to be computed again", ("ramet:fused_rows",)),
    "substituted_pages": ("Pages of reasoning steps that were replaced by others", ("ramet:substituted_pages",)),
    "deferred_evaluations": (
        "Comparisons of reasoning steps that were put off for lack of CPU time",
        ("ramet:reasoning_deferred",),
    ),
    "reasoning_seconds": ("CPU seconds of the comparison of reasoning steps", ("ramet:reasoning_cpu_seconds",)),
    "drafts": ("Drafts that were verified", ("vllm:spec_decode_num_drafts",)),
    "drafted_tokens": ("Tokens of drafts that were verified", ("vllm:spec_decode_num_draft_tokens",)),
    "accepted_tokens": ("Tokens of drafts that were right", ("vllm:spec_decode_num_accepted_tokens",)),
    "prefill_tokens": ("Token rows computed by prefill", ("ramet:prefill_tokens",)),
    "tier_loads": ("Loads from tiers that brought tokens", ("ramet:tier_loads",)),
    "tier_loads_late": ("Loads from tiers that took too long", ("ramet:tier_loads_late",)),
    "tier_writes_dropped": (
        "Blocks not written to tiers, as too many waited",
        ("ramet:tier_writes_dropped",),
    ),
}
_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "paused": ("Whether the engine is paused", ("ramet:paused",)),
    "running": ("Requests that run", ("sglang:num_running_reqs", "vllm:num_requests_running")),
    "waiting": ("Requests that wait", ("sglang:num_queue_reqs", "vllm:num_requests_waiting")),
    "retracted_requests": ("Requests that gave up their pages, since start", ("sglang:num_retracted_reqs",)),
    "throughput": ("Generated tokens per second over the last seconds", ("sglang:gen_throughput",)),
    "usage": ("Share of the pool that live requests hold", ("sglang:token_usage", "vllm:kv_cache_usage_perc")),
    "hit_rate": ("Cached share of all prompt tokens since start", ("sglang:cache_hit_rate",)),
    "pages_total": ("Pages in the pool", ("ramet:pages_total",)),
    "pages_free": ("Free pages", ("ramet:pages_free",)),
    "pages_tree": ("Pages held by the tree", ("ramet:pages_tree",)),
    "pages_private": ("Pages private to live requests", ("ramet:pages_private",)),
    "pages_locked": ("Pages of the tree that live requests use and no pin holds", ("ramet:pages_locked",)),
    "pages_pinned": ("Pages of the tree that are pinned", ("ramet:pages_pinned",)),
    "saved_pages": ("Pages that live requests save by shared reasoning steps", ("ramet:saved_pages",)),
    "pins": ("Pins", ("ramet:pins",)),
    "keeps": ("Prefixes that tenants keep for a time", ("ramet:keeps",)),
    "tree_nodes": ("Nodes of the tree", ("ramet:tree_nodes",)),
    "connections": ("Open connections, this one too", ("ramet:connections",)),
}


# Events of tiers that have series from the beginning.
_TIER_EVENTS = ("hits", "misses", "written", "failed", "dropped")
# Statistics of a tier -> (name, help).
_TIER_GAUGES = {
    "blocks": ("ramet:tier_stored_blocks", "Blocks in a tier"),
    "bytes": ("ramet:tier_stored_bytes", "Bytes in a tier"),
    "queued_bytes": ("ramet:tier_queued_bytes", "Bytes that wait to be written to a tier"),
    "open": ("ramet:tier_open", "0 while a failing tier is left alone, else 1"),
}

# The engine's histograms: of pages, in seconds; of steps, in tokens.
_HISTOGRAMS: dict[str, tuple[str, str]] = {
    "idle_before_evict_s": (
        "Seconds from a page's last use to its eviction",
        "vllm:kv_block_idle_before_evict_seconds",
    ),
    "lifetime_s": ("Seconds from a page's insertion to its eviction", "vllm:kv_block_lifetime_seconds"),
    "step_rows": ("Token rows of a step", "vllm:iteration_tokens_total"),
    "reuse_gap_s": ("Seconds between two uses of a prefix", "vllm:kv_block_reuse_gap_seconds"),
}
# Histograms of this process -> (help, names).
_OBSERVED: dict[str, tuple[str, tuple[str, ...]]] = {
    "ttft": (
        "Seconds to the first token",
        ("sglang:time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    ),
    "itl": (
        "Seconds between output tokens",
        ("sglang:inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
    ),
    "e2e": (
        "Seconds from submission to the end",
        ("sglang:e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
    ),
    "queue": ("Seconds in the waiting queue", ("sglang:queue_time_seconds", "vllm:request_queue_time_seconds")),
    "prefill": ("Seconds from admission to the first token", ("vllm:request_prefill_time_seconds",)),
    "decode": ("Seconds from the first token to the end", ("vllm:request_decode_time_seconds",)),
    "tpot": ("Seconds per output token after the first", ("vllm:request_time_per_output_token_seconds",)),
    "prompt": ("Prompt tokens of a request", ("vllm:request_prompt_tokens",)),
    "generation": ("Generated tokens of a completion", ("vllm:request_generation_tokens",)),
}


class Metrics:
    """The metrics registry of a server."""

    def __init__(self, model: str):
        self._labels = {"model_name": model}
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._state: dict[str, Any] = {}
        self._generated = Rate()
        self._ttfts = Recent()
        self._registry.register(self)
        self._observed = {key: Histogram(_SECONDS) for key in _OBSERVED}
        self._observed |= {key: Histogram(_TOKENS) for key in ("prompt", "generation")}
        self._http = Counter("http_requests", "HTTP requests", ["handler", "method", "status"], registry=self._registry)
        self._success = Counter(
            "vllm:request_success", "Finished requests", [*self._labels, "finished_reason"], registry=self._registry
        )

    def count_request(self, method: str, path: str, status: int) -> None:
        """Count an HTTP request; `path`: of its route, so that no client can make up labels."""
        known = method if method in _METHODS else "other"
        self._http.labels(handler=path, method=known, status=f"{status // 100}xx").inc()

    def observe(self, output: Output, previous_s: float | None) -> None:
        """Record an Output; `previous_s` is the `e2e_s` of the completion's previous tokens, None before the first."""
        new, observed = len(output.new_token_ids), self._observed
        self._generated.add(new)
        if new and previous_s is None:
            observed["ttft"].add(output.e2e_s)
            self._ttfts.add(output.e2e_s)
            observed["queue"].add(output.queue_s)
            observed["prefill"].add(output.prefill_s)
        elif new and previous_s is not None:
            observed["itl"].add((output.e2e_s - previous_s) / new, times=new)
        if output.finish is not None:
            self._observe_end(output, output.finish.type)

    def _observe_end(self, output: Output, reason: str) -> None:
        observed = self._observed
        observed["generation"].add(output.completion_tokens)
        if output.choice == 0:
            observed["prompt"].add(output.prompt_tokens)
        decode_s = max(output.e2e_s - output.queue_s - output.prefill_s, 0.0)
        observed["e2e"].add(output.e2e_s)
        observed["decode"].add(decode_s)
        if output.completion_tokens > 1:
            observed["tpot"].add(decode_s / (output.completion_tokens - 1))
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def now(self) -> dict[str, float | None]:
        """Recent figures: generated tokens per second, and percentiles of the time to first token in seconds."""
        return {
            "tokens_per_s": self._generated.per_second(),
            "ttft_p50_s": self._ttfts.percentile(50),
            "ttft_p95_s": self._ttfts.percentile(95),
        }

    def render(self, state: dict[str, Any], adapters: Mapping[str, str]) -> bytes:
        """The exposition text; `state`: `AsyncEngine.state()`, and more; `adapters`: digests by name."""
        queried, used = state["queried_tokens"], state["pages_private"] + state["pages_locked"]
        self._state = {
            **state,
            "usage": used / state["pages_total"],
            "throughput": self._generated.per_second(),
            "hit_rate": state["cached_tokens"] / queried if queried else 0.0,
            "requests_by_adapter": {n: state["requests_by_adapter"].get(digest, 0) for n, digest in adapters.items()},
        }
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's state as metrics; called by the registry."""
        for table, family in ((_COUNTERS, CounterMetricFamily), (_GAUGES, GaugeMetricFamily)):
            for key, (text, names) in table.items():
                for name in names:
                    yield self._metric(family, name, text, {(): self._state.get(key, 0)})
        for key, (text, names) in _OBSERVED.items():
            yield from (self._histogram(name, text, **vars(self._observed[key])) for name in names)
        if self._state:
            yield from (self._histogram(name, text, **self._state[key]) for key, (text, name) in _HISTOGRAMS.items())
            yield from self._labelled(self._state)

    def _labelled(self, state: dict[str, Any]) -> Iterator[Metric]:
        """Metrics with labels of their own; without tiers, theirs have no samples."""
        causes = {(cause,): tokens for cause, tokens in state["evicted_tokens_by_cause"].items()}
        yield self._metric(
            CounterMetricFamily, "ramet:evicted_tokens", "Tokens evicted from the cache", causes, "cause"
        )
        requests = {(adapter,): count for adapter, count in state["requests_by_adapter"].items()}
        yield self._metric(CounterMetricFamily, "ramet:adapter_requests", "Requests of an adapter", requests, "adapter")
        loaded = {(tier,): tokens for tier, tokens in state.get("loaded_tokens_by_tier", {}).items()}
        yield self._metric(CounterMetricFamily, "ramet:tier_loaded_tokens", "Tokens loaded from a tier", loaded, "tier")
        tiers = state.get("tiers", {})
        events = {
            (tier, event): count
            for tier, stats in tiers.items()
            for event, count in {**dict.fromkeys(_TIER_EVENTS, 0), **stats["counts"]}.items()
        }
        yield self._metric(
            CounterMetricFamily, "ramet:tier_blocks", "Blocks of a tier, by event", events, "tier", "event"
        )
        for field, (name, text) in _TIER_GAUGES.items():
            yield self._metric(GaugeMetricFamily, name, text, {(tier,): tiers[tier][field] for tier in tiers}, "tier")
        waiting = {("capacity",): state["waiting"] - state["blocked"], ("deferred",): state["blocked"]}
        name = "vllm:num_requests_waiting_by_reason"
        yield self._metric(GaugeMetricFamily, name, "Requests that wait, by reason", waiting, "reason")

    def _metric(
        self,
        family: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        values: Mapping[Any, float],
        *labels: str,
    ) -> Metric:
        """A metric with a value for each tuple of labels, beside the model's name."""
        metric = family(name, text, labels=[*self._labels, *labels])
        for own, value in values.items():
            metric.add_metric([*self._labels.values(), *own], value)
        return metric

    def _histogram(self, name: str, text: str, bounds: Sequence[float], counts: list[int], total: float) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        buckets = zip(map(floatToGoString, [*bounds, math.inf]), accumulate(counts), strict=True)
        family.add_metric(list(self._labels.values()), list(buckets), total)
        return family
