"""Ray Serve's request router for engines: prefixes against load."""

from __future__ import annotations

import asyncio
from array import array
from functools import partial
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from server.ray.follower import Follower
from server.ray.placement import Placement


class PrefixRouter(RequestRouter):
    """Ranks replicas by the tokens of a prompt that they hold, according to their KV events.

    A call's keyword argument `hashes` (uint64, one a block) is the prompt; without it, load decides.
    """

    def initialize_state(self, block_size: int, weight: float, balance: float) -> None:
        """See `Placement`; `block_size` is in tokens."""
        self._placement: Placement[ReplicaID] = Placement(block_size, weight, balance)
        self._followers: dict[ReplicaID, Follower[ReplicaID]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow the events of new replicas, and forget replicas that have left."""
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
        """Ranks of one replica each: Serve takes the first one that has room.

        The first one is booked at once; until Serve hears from it, the next call would find it idle.
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
