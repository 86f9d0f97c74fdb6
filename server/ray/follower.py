"""Applies a replica's KV events to an index."""

import asyncio
import logging
from typing import Generic

import msgspec
import zmq
import zmq.asyncio

from runtime.features.kv_events.publisher import POOL_MEDIUM, AllBlocksCleared, BlockStored, EventBatch
from server.ray.prefixes import PrefixIndex, R

log = logging.getLogger("ramet.ray")

# After this many seconds without events, missed events are requested, because ZeroMQ reconnects without notice.
_QUIET_S = 5.0
_REPLAY_S = 5.0

_decode = msgspec.msgpack.Decoder(EventBatch).decode


class ReplicaFollower(Generic[R]):
    """Applies the events of one replica to an index. Create and close it on the same event loop.

    Args:
        index: the index of all replicas' blocks.
        replica: the replica's name in the index.
        events, replay: ZeroMQ endpoints of the replica's events and of their replay.
    """

    def __init__(self, index: PrefixIndex[R], replica: R, events: str, replay: str):
        self._index = index
        self._replica = replica
        self._replay = replay
        self._next = 0
        self._context = zmq.asyncio.Context()
        self._heard = self._context.socket(zmq.SUB)
        self._heard.setsockopt(zmq.SUBSCRIBE, b"")
        self._heard.connect(events)
        self._task = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        try:
            while True:
                await self._catch_up()
                while await self._heard.poll(int(1000 * _QUIET_S)):
                    _, number, payload = await self._heard.recv_multipart()
                    if not self._take(int.from_bytes(number, "big"), payload):
                        break
        except Exception:
            log.exception("the KV events of a replica are no longer followed")
            self._index.forget(self._replica)

    def _take(self, number: int, payload: bytes) -> bool:
        """Apply a batch; False if an earlier one is missing."""
        if number > self._next:
            return False
        if number == self._next:
            self._next += 1
            for event in _decode(payload).events:
                if isinstance(event, AllBlocksCleared):
                    self._index.forget(self._replica)
                elif event.medium != POOL_MEDIUM:
                    continue  # blocks in tiers do not count: loading takes time, and all replicas share the store
                elif isinstance(event, BlockStored):
                    self._index.stored(self._replica, event.block_hashes)
                else:
                    self._index.removed(self._replica, event.block_hashes)
        return True

    async def _catch_up(self) -> None:
        """Request the missing batches. `_follow` calls this again if the replica does not answer."""
        ask = self._context.socket(zmq.DEALER)
        ask.setsockopt(zmq.LINGER, 0)
        try:
            ask.connect(self._replay)
            await ask.send_multipart([b"", self._next.to_bytes(8, "big")])
            while await ask.poll(int(1000 * _REPLAY_S)):
                _, number, payload = await ask.recv_multipart()
                if not payload:
                    break
                if (first := int.from_bytes(number, "big")) > self._next:  # the publisher dropped the batches between
                    self._index.forget(self._replica)
                    self._next = first
                self._take(first, payload)
        finally:
            ask.close()

    def close(self) -> None:
        """Stop, and remove the replica from the index."""
        self._task.cancel()
        self._context.destroy(linger=0)
        self._index.forget(self._replica)
