"""The request router for Ray Serve, which weighs cached prefixes against load."""

from __future__ import annotations

import asyncio
from array import array
from functools import partial
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from server.ray.follower import ReplicaFollower
from server.ray.placement import Placement


class PrefixRouter(RequestRouter):
    """Ranks replicas by `Placement`. Their KV events tell which blocks they hold.

    A call's keyword argument `hashes` has the prompt's block hashes (uint64). Without it, only load counts.
    """

    def initialize_state(self, block_size: int, weight: float, balance: float) -> None:
        """The arguments are those of `Placement`; `block_size` is in tokens."""
        self._placement: Placement[ReplicaID] = Placement(block_size, weight, balance)
        self._followers: dict[ReplicaID, ReplicaFollower[ReplicaID]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow the events of new replicas, and remove replicas that have left."""
        super().update_replicas(replicas)
        there = {replica.replica_id: replica.replica_metadata for replica in replicas}
        for replica in self._followers.keys() - there.keys():
            self._forget(replica)
        for replica, metadata in there.items():
            if replica not in self._followers and "events" in metadata:
                self._placement.join(replica)
                follower = ReplicaFollower(self._placement.index, replica, metadata["events"], metadata["replay"])
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
        """The replicas by rank, each in a list of its own. Serve takes the first replica with room.

        The call counts for the first replica at once, because the next call may be routed before Serve reaches it.
        """
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        hashes = _hashes(pending_request)
        ranked = self._placement.rank(hashes, by_id)
        if pending_request is not None:
            call = pending_request.metadata.internal_request_id
            self._placement.begin(ranked[0], call, hashes)
            pending_request.future.add_done_callback(partial(self._give_up, ranked[0], call))
        return [[by_id[replica]] for replica in ranked]

    def _give_up(self, replica: ReplicaID, call: str, routed: asyncio.Future[Any]) -> None:
        """End a call whose client disconnected before it was routed."""
        if routed.cancelled():
            self._placement.end(replica, call)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._placement.move(replica_id, pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._placement.end(replica_id, internal_request_id)


def _hashes(request: PendingRequest | None) -> array[int]:
    return array("Q", b"" if request is None else request.kwargs.get("hashes", b""))
