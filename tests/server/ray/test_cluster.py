"""Replicas on a Ray cluster of two nodes on one machine: routes, streams, prefixes, and a replica that is killed."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from socket import socket

import httpx
import pytest

ray = pytest.importorskip("ray", reason="needs ray: make extra-ray")

from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from runtime.errors import EngineDead  # noqa: E402
from server.ray.application import app  # noqa: E402

NEW = 470


@pytest.fixture(scope="module")
def url(tiny_dir) -> Iterator[str]:
    with closing(socket()) as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        options = f"--model {tiny_dir} --dtype float32 --pool-tokens 8192 --threads 1 --max-running 8"
        serve.run(app({"options": options, "replicas": "2", "weight": "2"}), name="ramet")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def generate(url: str, ids: list[int], new: int = 2, **more) -> httpx.Response:
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling, **more}, timeout=120)


def test_routes_streams_and_errors_are_the_servers(url):
    (model,) = httpx.get(f"{url}/v1/models", timeout=120).json()["data"]
    chat = {"model": model["id"], "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    whole = httpx.post(f"{url}/v1/chat/completions", json={**chat, "temperature": 0}, timeout=120).json()
    body = {**chat, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    said = "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1])
    assert said == whole["choices"][0]["message"]["content"]
    refused = httpx.post(f"{url}/v1/chat/completions", json={**chat, "max_tokens": 10**6}, timeout=120)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert httpx.get(f"{url}/nowhere", timeout=120).status_code == 404
    assert httpx.post(f"{url}/generate", content=b"{", timeout=120).status_code == 400


def test_a_prompt_goes_where_its_prefix_is(url):
    """Chance would send 12 prompts of 12 back to the replicas that have them once in 4,096 times."""
    for attempt in range(5):
        prompts = [[1000 * attempt + n] * 64 for n in range(12)]
        for prompt in prompts:
            assert generate(url, prompt).status_code == 200
        time.sleep(0.5 * 2**attempt)  # events travel
        cached = [generate(url, prompt).json()["meta_info"]["cached_tokens"] for prompt in prompts]
        if min(cached) >= 48:
            return
    raise AssertionError(cached)


def read_stream(url: str, ids: list[int], begun: threading.Semaphore) -> list[str]:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": NEW, "ignore_eos": True}, "stream": True}
    lines = []
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=120) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                if not lines:
                    begun.release()
                lines.append(line.removeprefix("data: "))
    return lines


def test_a_replica_that_dies_loses_nothing_that_had_not_begun(url):
    expected = generate(url, [7] * 32, NEW).json()["output_ids"]
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    victim = ray.get_actor(next(name for name in sorted(names) if "#replica#" in name), namespace="serve")
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(generate, url, [7] * 32, NEW) for _ in range(8)]
        streams = [pool.submit(read_stream, url, [n] * 32, begun) for n in range(4)]
        for _ in streams:
            assert begun.acquire(timeout=60)
        ray.kill(victim)
        for answer in answers:
            assert answer.result().status_code == 200, answer.result().text
            assert answer.result().json()["output_ids"] == expected
        ends = [stream.result() for stream in streams]
    broken = [json.loads(lines[-2]) for lines in ends if "error" in json.loads(lines[-2])]
    assert 0 < len(broken) < 4, "two replicas share four streams"
    assert all(lines[-1] == "[DONE]" for lines in ends)
    assert {event["error"]["type"] for event in broken} == {EngineDead.type}

    def running() -> int:
        return serve.status().applications["ramet"].deployments["replica"].replica_states.get("RUNNING", 0)

    deadline = time.monotonic() + 120
    while running() < 2:
        assert time.monotonic() < deadline, serve.status()
        time.sleep(0.5)
    assert generate(url, [9] * 32).status_code == 200
