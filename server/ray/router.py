"""Ray Serve's request router for engines: the replica with the longest prefix, while load allows."""

from __future__ import annotations

from array import array
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from server.ray.follower import Follower
from server.ray.prefixes import BoundedPrefix, PrefixIndex


class PrefixRouter(RequestRouter):
    """Ranks replicas by the tokens of a prompt that they hold, as their KV events say.

    A call's keyword argument `hashes` (uint64, one a block) is the prompt; without it two random replicas are compared.
    """

    def initialize_state(self, block_size: int, weight: float, share: float, slack: float) -> None:
        """See `BoundedPrefix`; `block_size` is in tokens."""
        self._block_size = block_size
        self._policy = BoundedPrefix(weight, share, slack)
        self._index: PrefixIndex[ReplicaID] = PrefixIndex()
        self._followers: dict[ReplicaID, Follower[ReplicaID]] = {}
        # Tokens that a call makes its replica compute, until it ends.
        self._loads: dict[ReplicaID, dict[str, int]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow the events of new replicas, and those of replicas that have left no more."""
        super().update_replicas(replicas)
        there = {replica.replica_id: replica.replica_metadata for replica in replicas}
        for replica in self._followers.keys() - there.keys():
            self._forget(replica)
        for replica, metadata in there.items():
            if replica not in self._followers and "events" in metadata:
                follower = Follower(self._index, replica, metadata["events"], metadata["replay"])
                self._followers[replica] = follower

    def _forget(self, replica: ReplicaID) -> None:
        self._loads.pop(replica, None)
        if follower := self._followers.pop(replica, None):
            follower.close()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each: Serve takes the first one that has room."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        loads = {replica: float(sum(self._loads.get(replica, {}).values())) for replica in by_id}
        matches = {replica: n * self._block_size for replica, n in self._index.match(_hashes(pending_request)).items()}
        return [[by_id[replica]] for replica in self._policy.rank(matches, loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count the blocks that the replica lacks as its load, until the call ends."""
        hashes = _hashes(pending_request)
        lacking = len(hashes) - self._index.match(hashes).get(replica_id, 0) + 1
        call = pending_request.metadata.internal_request_id
        self._loads.setdefault(replica_id, {})[call] = lacking * self._block_size

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._loads.get(replica_id, {}).pop(internal_request_id, None)


def _hashes(request: PendingRequest | None) -> array[int]:
    return array("Q", b"" if request is None else request.kwargs.get("hashes", b""))
