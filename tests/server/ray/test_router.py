"""Serve's hooks of the router, called as Serve does, over replicas that nobody serves."""

import asyncio
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

pytest.importorskip("ray", reason="needs ray: make extra-ray")

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest

from server.ray.router import PrefixRouter

FLEET = DeploymentID("replica", "ramet")


@dataclass
class Idle:
    """As much of a `RunningReplica` as a router asks of it."""

    replica_id: ReplicaID
    replica_metadata: dict[str, str]
    max_ongoing_requests: int = 256

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def request(number: int) -> PendingRequest:
    prompt = array("Q", range(1000 * number, 1000 * number + 4)).tobytes()
    return PendingRequest(args=[], kwargs={"hashes": prompt}, metadata=RequestMetadata(f"{number}", f"i{number}"))


class Routed:
    """A router over two replicas, on a running loop."""

    def __init__(self, directory):
        self.router = PrefixRouter(FLEET, DeploymentHandleSource.REPLICA)
        self.router.initialize_state(16, 16, 0.1)
        ends = {"events": f"ipc://{directory}/e", "replay": f"ipc://{directory}/r"}
        self.replicas = [Idle(ReplicaID(name, FLEET), ends) for name in "ab"]
        self.router.update_replicas(self.replicas)

    async def choose(self, one: PendingRequest) -> str:
        ranks = await self.router.choose_replicas(self.replicas, one)
        return ranks[0][0].replica_id.unique_id

    def loads(self) -> Iterator[int]:
        return iter(self.router._placement.loads.values())


def on_loop(scenario, directory) -> None:
    async def scene() -> None:
        routed = Routed(directory)
        await scenario(routed)
        routed.router.update_replicas([])

    asyncio.run(scene())


def test_prompts_that_come_together_part(tmp_path):
    """Serve tells of a call once its replica has taken it: many may be chosen for before that."""

    async def scenario(routed: Routed) -> None:
        chosen = Counter([await routed.choose(request(number)) for number in range(16)])
        assert set(chosen.values()) == {8}

    on_loop(scenario, tmp_path)


def test_a_call_weighs_until_it_ends(tmp_path):
    async def scenario(routed: Routed) -> None:
        calls = [request(number) for number in range(3)]
        for one in calls:
            chosen = await routed.choose(one)
        first, second = (replica.replica_id for replica in routed.replicas)
        where = next(replica for replica in (first, second) if replica.unique_id == chosen)
        calls[2].future.cancel()  # its client leaves
        await asyncio.sleep(0)
        assert sorted(routed.loads()) == [64, 64]
        for one in calls[:2]:
            one.future.set_result(None)
            await asyncio.sleep(0)
            routed.router.on_request_routed(one, where, None)
        assert sorted(routed.loads()) == [0, 128], "Serve took another one than was asked for"
        for one in calls[:2]:
            routed.router.on_request_completed(where, one.metadata.internal_request_id)
            routed.router.on_request_routed(one, where, None)  # it may come late
        assert sorted(routed.loads()) == [0, 0]

    on_loop(scenario, tmp_path)
