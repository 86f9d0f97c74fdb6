"""Metric names and rates."""

import socket
import time
from contextlib import ExitStack

from runtime.frontend.output import Output
from server.telemetry.metrics import Metrics
from server.telemetry.rates import Recent
from tests.server.conftest import PATIENCE_S

LABELS = '{model_name="smollm2"}'

# Names that dashboards for SGLang and vLLM read.
NAMES = [
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "sglang:cache_hit_rate",
    "sglang:gen_throughput", "sglang:num_retracted_reqs", "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total", "sglang:cached_tokens_total", "sglang:evicted_tokens_total",
    "sglang:num_requests_total", "sglang:num_aborted_requests_total", "sglang:time_to_first_token_seconds_count",
    "sglang:inter_token_latency_seconds_sum", "sglang:e2e_request_latency_seconds_count",
    "sglang:queue_time_seconds_count", "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total", "vllm:time_to_first_token_seconds_count",
    "vllm:request_time_per_output_token_seconds_count", "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count", "vllm:request_queue_time_seconds_count",
    "vllm:request_prefill_time_seconds_count", "vllm:request_decode_time_seconds_count",
    "vllm:kv_block_idle_before_evict_seconds_count", "vllm:kv_block_lifetime_seconds_count",
    "vllm:kv_block_reuse_gap_seconds_sum", "ramet:prefix_cache_request_hits_total",
]  # fmt: skip


def read(client):
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))


def test_requests_are_counted_under_both_names(client):
    before = read(client)
    assert {name + LABELS for name in NAMES} <= before.keys()
    body = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True, "n": 2}}
    assert client.post("/generate", json=body).status_code == 200
    after = read(client)

    def grown(name, labels=LABELS):
        return float(after[name + labels]) - float(before.get(name + labels, 0))

    for house in ("sglang", "vllm"):
        assert grown(f"{house}:time_to_first_token_seconds_count") == 2
        assert grown(f"{house}:inter_token_latency_seconds_count") == 8
        assert grown(f"{house}:e2e_request_latency_seconds_count") == 2
        assert grown(f"{house}:generation_tokens_total") == 10
    assert grown("vllm:request_generation_tokens_sum") == 10
    assert grown("vllm:request_generation_tokens_count") == 2
    prompt = 4
    assert grown("vllm:request_prompt_tokens_sum") == prompt, "a prompt counts once, for all its completions"
    assert grown("vllm:iteration_tokens_total_sum") >= prompt + 2 * 4
    assert grown("vllm:iteration_tokens_total_count") >= 5
    waiting = [name for name in after if name.startswith("vllm:num_requests_waiting_by_reason")]
    assert [after[name] for name in waiting] == ["0.0", "0.0"]
    assert grown("http_requests_total", '{handler="/generate",method="POST",status="2xx"}') == 1
    assert "vllm:prompt_tokens_cached_total" + LABELS in after
    assert float(after["process_cpu_seconds_total"]) > 0
    assert grown("vllm:request_success_total", '{finished_reason="length",model_name="smollm2"}') == 2
    assert float(after["sglang:num_running_reqs" + LABELS]) == 0


def test_open_connections(client, server):
    host, port = server.url.removeprefix("http://").split(":")
    deadline = time.monotonic() + PATIENCE_S

    def count() -> float:
        return float(read(client)["ramet:connections" + LABELS])

    while True:
        before = count()
        with ExitStack() as opened:
            for _ in range(3):
                opened.enter_context(socket.create_connection((host, int(port))))
            for _ in range(50):
                if count() == before + 3 >= 4:
                    return
                time.sleep(0.02)
        assert time.monotonic() < deadline  # another client's connection was closed meanwhile


def test_evictions_by_cause_and_how_long_pages_were_idle(client):
    before = read(client)
    body = {"input_ids": list(range(300, 340)), "sampling_params": {"max_new_tokens": 1}}
    for _ in range(2):
        assert client.post("/generate", json=body).status_code == 200
    flushed = client.post("/flush_cache").json()["flushed_tokens"]
    after = read(client)
    cause = 'ramet:evicted_tokens_total{cause="flush",model_name="smollm2"}'
    assert float(after[cause]) - float(before[cause]) == flushed >= 32
    name = "vllm:kv_block_idle_before_evict_seconds"
    assert float(after[f"{name}_count{LABELS}"]) - float(before[f"{name}_count{LABELS}"]) == flushed / 16
    assert after[f'{name}_bucket{{le="+Inf",model_name="smollm2"}}'] == after[f"{name}_count{LABELS}"]
    gap = f"vllm:kv_block_reuse_gap_seconds_count{LABELS}"
    assert float(after[gap]) - float(before[gap]) >= 1


def test_a_rate_forgets():
    now = 100.0
    rate = Recent(window_s=10, clock=lambda: now)
    rate.add(30)
    assert rate.per_second() == 30
    now = 105.0
    rate.add(20)
    assert rate.per_second() == 10
    now = 114.0
    assert rate.per_second() == 2
    now = 200.0
    assert rate.per_second() == 0


def test_tokens_that_come_together_share_the_time_between_two_outputs():
    metrics = Metrics("m")
    metrics.observe(Output(0, 0, "r", new_token_ids=[1], e2e_s=1.0), None)
    metrics.observe(Output(0, 0, "r", new_token_ids=[1] * 4, e2e_s=3.0), 1.0)
    assert (metrics._observed["itl"].total, sum(metrics._observed["itl"].counts)) == (2.0, 4)
