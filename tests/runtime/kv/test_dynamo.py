"""Dynamo's selection service, fed by KV events: replayed ones, salted ones, and the pool as the device's memory."""

from __future__ import annotations

import os
import subprocess
import time
from array import array

import httpx
import pytest

from loadgen.http.local_server import free_port
from radix import Namespace, Removed, Stored
from radix.events import block_hashes
from runtime.config import CacheConfig
from runtime.kv.publisher import EventPublisher

# An interpreter with ai-dynamo-runtime, in an environment of its own.
PYTHON = os.environ.get("RAMET_DYNAMO_PYTHON")
ACME = Namespace("acme", "s")
FIRST, SECOND, SALTED, LATER = (list(range(n, n + 40)) for n in (100, 200, 300, 400))

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs RAMET_DYNAMO_PYTHON, with ai-dynamo-runtime")


class Replica:
    """The events of a replica that the service knows."""

    def __init__(self, number: int, service: httpx.Client):
        events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        config = CacheConfig(kv_events=events, kv_events_replay=replay, page_size=4, kv_events_of="all")
        self.publisher = EventPublisher(config)
        self.worker = {
            **{"worker_id": number, "endpoint": f"http://127.0.0.1:{number}", "model_name": "tiny", "block_size": 4},
            **{"kv_events_endpoints": {"0": events}, "replay_endpoint": replay},
        }
        self.service = service

    def store(self, tokens: list[int], namespace: Namespace = Namespace(), tier: str | None = None) -> Stored:
        key = array("i", tokens).tobytes()
        event = Stored(block_hashes(key, 16, None, namespace), None, key, namespace)
        self.publisher.publish([event], tier)
        return event

    def register(self) -> None:
        assert self.service.post("/workers", json=self.worker).status_code == 201


@pytest.fixture
def service():
    port = free_port()
    command = [PYTHON, "-m", "dynamo.select_service", "--port", str(port), "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
        deadline = time.monotonic() + 60
        while True:
            try:
                client.get("/health")
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield client
    process.terminate()
    process.wait(30)


def test_it_finds_the_replica_with_the_longest_prefix(service):
    replicas = [Replica(number, service) for number in (1, 2)]
    replicas[0].store(FIRST)  # before anybody listens
    replicas[1].store(SECOND)
    for replica in replicas:
        replica.register()

    def select(tokens: list[int], salt: str | None = None) -> tuple[int, int]:
        body = {"model_name": "tiny", "token_ids": tokens, **({} if salt is None else {"cache_salt": salt})}
        found = service.post("/select", json=body).json()
        return found["worker_id"], found["overlap"]["gpu"]

    # A message with a later number makes the service ask for those that it missed.
    deadline = time.monotonic() + 60
    while (select(FIRST), select(SECOND), select(SALTED, "acme/s#")) != ((1, 40), (2, 40), (2, 40)):
        assert time.monotonic() < deadline, (select(FIRST), select(SECOND), select(SALTED, "acme/s#"))
        replicas[0].store(LATER)
        replicas[1].store(SALTED, ACME)
        for _ in range(20):
            time.sleep(0.02)
            for replica in replicas:
                replica.publisher.answer_replays()
    assert select(SALTED)[1] == 0, "a tenant's blocks are nobody else's"
    body = {"model_name": "tiny", "token_ids": SECOND[:20] + [0] * 20}
    reserved = service.post("/select_and_reserve", json=body).json()
    assert (reserved["worker_id"], reserved["overlap"]["gpu"]) == (2, 20)
    for replica in replicas:
        replica.publisher.close()


def test_a_tier_is_worth_more_than_nothing_and_less_than_the_pool(service):
    replica = Replica(1, service)
    stored = replica.store(FIRST)
    for tier in ("host", "disk"):
        replica.store(FIRST, tier=tier)
    replica.register()

    def select() -> tuple[int, int, int]:
        found = service.post("/select", json={"model_name": "tiny", "token_ids": FIRST}).json()
        left.append(found["effective_prefill_tokens"])
        return found["overlap"]["gpu"], found["overlap"]["cpu"], found["overlap"]["disk"]

    def until(expected: tuple[int, int, int]) -> None:
        deadline = time.monotonic() + 60
        while select() != expected:
            assert time.monotonic() < deadline
            replica.store(LATER)
            time.sleep(0.02)
        del left[:-1]

    left: list[int] = []
    until((40, 40, 40))
    replica.publisher.publish([Removed(stored.hashes, Namespace())])
    in_pool = left.pop()
    until((0, 40, 40))
    in_memory = left.pop()
    replica.publisher.publish([Removed(stored.hashes, Namespace())], "host")
    until((0, 0, 40))
    on_disk = left.pop()
    replica.publisher.publish([Removed(stored.hashes, Namespace())], "disk")
    until((0, 0, 0))
    assert in_pool < in_memory < on_disk < left.pop() == 40
    replica.publisher.close()
