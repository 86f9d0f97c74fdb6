"""KV events over ZeroMQ, in the format of vLLM and SGLang.

A message is `[topic, sequence number (8 bytes, big endian), msgpack]`; the payload is `[timestamp, events, rank]` and
an event an array that begins with its name. A consumer that missed some asks the replay socket (`[first number]` on a
REQ socket, or `[b"", first number]` on a DEALER) and gets `[number, payload]` for each that is kept, then number -1.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from radix.events import Event, Stored
from runtime.errors import ModelError

KEPT_BATCHES = 10_000
_END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """Blocks stored in the cache; field order is vLLM's."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    """Blocks removed from the cache."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    """The cache is empty: sent once at the start, for consumers that followed an earlier engine."""


class EventBatch(msgspec.Struct, array_like=True):
    """The events of one step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class EventPublisher:
    """The PUB socket, and the batches that can be replayed.

    Args:
        endpoint: address of the PUB socket, `tcp://127.0.0.1:5557` for example.
        replay_endpoint: address of the replay socket; None: no replays.
        block_size: tokens in a block.
        medium: memory of the blocks, `CPU` or `GPU`.
        with_tokens: whether events carry token ids; else `token_ids` is empty.

    Raises:
        ModelError: if an endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None, block_size: int, medium: str, with_tokens: bool):
        self._block_size = block_size
        self._medium = medium
        self._with_tokens = with_tokens
        self._context = zmq.Context()
        self._publish = self._bind(zmq.PUB, "--kv-events", endpoint)
        self._replay = self._bind(zmq.ROUTER, "--kv-events-replay", replay_endpoint) if replay_endpoint else None
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._next = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._send([AllBlocksCleared()])

    def _bind(self, kind: int, option: str, endpoint: str) -> zmq.Socket:
        socket = self._context.socket(kind)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ModelError(f"{option} {endpoint}: {error}") from None
        return socket

    def publish(self, events: Sequence[Event]) -> None:
        """Send a batch, and answer requests for earlier ones."""
        if events:
            self._send([self._wire(event) for event in events])
        self.answer_replays()

    def _wire(self, event: Event) -> BlockStored | BlockRemoved:
        if not isinstance(event, Stored):
            return BlockRemoved(list(event.hashes), self._medium)
        # The last page of a module is filled up with -1.
        tokens = [token for token in array("i", event.tokens) if token >= 0] if self._with_tokens else []
        return BlockStored(list(event.hashes), event.parent, tokens, self._block_size, None, self._medium)

    def _send(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        payload = self._encode(EventBatch(time.time(), events))
        self._kept.append((self._next, payload))
        self._publish.send_multipart([b"", self._next.to_bytes(8, "big"), payload])
        self._next += 1

    def answer_replays(self) -> None:
        while self._replay is not None and self._replay.poll(0):
            client, *_, start = self._replay.recv_multipart()
            if len(start) != 8:
                continue
            first = int.from_bytes(start, "big", signed=True)
            for number, payload in self._kept:
                if number >= first:
                    self._replay.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
            self._replay.send_multipart([client, b"", _END, b""])

    def close(self) -> None:
        self._publish.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.term()
