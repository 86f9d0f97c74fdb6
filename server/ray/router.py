"""Ray Serve's request router for engines: prefixes against load."""

from __future__ import annotations

from array import array
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from server.ray.follower import Follower
from server.ray.placement import Placement


class PrefixRouter(RequestRouter):
    """Ranks replicas by the tokens of a prompt that they hold, as their KV events say.

    A call's keyword argument `hashes` (uint64, one a block) is the prompt; without it load and past work decide.
    """

    def initialize_state(self, block_size: int, weight: float, balance: float) -> None:
        """See `Placement`; `block_size` is in tokens."""
        self._placement: Placement[ReplicaID] = Placement(block_size, weight, balance)
        self._followers: dict[ReplicaID, Follower[ReplicaID]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow the events of new replicas, and those of replicas that have left no more."""
        super().update_replicas(replicas)
        there = {replica.replica_id: replica.replica_metadata for replica in replicas}
        for replica in self._followers.keys() - there.keys():
            self._forget(replica)
        for replica, metadata in there.items():
            if replica not in self._followers and "events" in metadata:
                self._placement.join(replica)
                follower = Follower(self._placement.index, replica, metadata["events"], metadata["replay"])
                self._followers[replica] = follower

    def _forget(self, replica: ReplicaID) -> None:
        if follower := self._followers.pop(replica, None):
            follower.close()
        self._placement.leave(replica)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each: Serve takes the first one that has room."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        return [[by_id[replica]] for replica in self._placement.rank(_hashes(pending_request), by_id)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count the blocks that the replica lacks as its load, until the call ends."""
        self._placement.begin(replica_id, pending_request.metadata.internal_request_id, _hashes(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._placement.end(replica_id, internal_request_id)


def _hashes(request: PendingRequest | None) -> array[int]:
    return array("Q", b"" if request is None else request.kwargs.get("hashes", b""))
