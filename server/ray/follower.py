"""KV events of replicas, followed into an index."""

from __future__ import annotations

import asyncio
import logging
from typing import Generic

import msgspec
import zmq
import zmq.asyncio

from runtime.kv.publisher import POOL_MEDIUM, AllBlocksCleared, BlockStored, EventBatch
from server.ray.prefixes import PrefixIndex, R

log = logging.getLogger("ramet.ray")

# Seconds without a word after which it is asked whether any was missed: a reconnection is silent.
_QUIET_S = 5.0
_REPLAY_S = 5.0

_decode = msgspec.msgpack.Decoder(EventBatch).decode


class Follower(Generic[R]):
    """Keeps what an index knows of one replica up to date; created and closed on one event loop.

    Args:
        index: is told of every change.
        replica: under this name.
        events: endpoint of its events.
        replay: endpoint of its replays.
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
            log.exception("the KV events of a replica are followed no more")
            self._index.forget(self._replica)

    def _take(self, number: int, payload: bytes) -> bool:
        """Book a batch; False if others came before it that are not known."""
        if number > self._next:
            return False
        if number == self._next:
            self._next += 1
            for event in _decode(payload).events:
                if isinstance(event, AllBlocksCleared):
                    self._index.forget(self._replica)
                elif event.medium != POOL_MEDIUM:
                    continue  # a load costs time, and stores that replicas share say nothing of a choice
                elif isinstance(event, BlockStored):
                    self._index.stored(self._replica, event.block_hashes)
                else:
                    self._index.removed(self._replica, event.block_hashes)
        return True

    async def _catch_up(self) -> None:
        """Ask for the batches that are not known yet; a replica that does not answer is asked again later."""
        ask = self._context.socket(zmq.DEALER)
        ask.setsockopt(zmq.LINGER, 0)
        try:
            ask.connect(self._replay)
            await ask.send_multipart([b"", self._next.to_bytes(8, "big")])
            while await ask.poll(int(1000 * _REPLAY_S)):
                _, number, payload = await ask.recv_multipart()
                if not payload:
                    break
                if (first := int.from_bytes(number, "big")) > self._next:  # those between are kept no more
                    self._index.forget(self._replica)
                    self._next = first
                self._take(first, payload)
        finally:
            ask.close()

    def close(self) -> None:
        """Follow no more, and let the index forget the replica."""
        self._task.cancel()
        self._context.destroy(linger=0)
        self._index.forget(self._replica)
