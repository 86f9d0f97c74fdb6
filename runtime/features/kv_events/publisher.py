"""KV events over ZeroMQ, in the format of vLLM and SGLang.

A message is `[topic, sequence number (8 bytes, big endian), msgpack]`; the payload is `[timestamp, events, rank]`, and
an event is a map whose `type` is its name. A consumer that missed messages sends `[first number]` on a REQ socket, or
`[b"", first number]` on a DEALER, to the replay socket. It gets `[number, payload]` for each kept message, then
number -1. A gap in the numbers shows which messages are no longer kept.
"""

import time
from array import array
from collections.abc import Sequence
from itertools import groupby

import msgspec
import zmq

from radix import Namespace
from radix.events import Event, Stored
from runtime.config import CacheConfig
from runtime.errors import ModelError
from runtime.features.kv_events.replays import Kept, Replays

# The pool is `GPU`, even on a CPU: routers take `GPU` for the memory that attention reads, and `CPU` for a slower tier.
# The names of tiers are SGLang's, which Dynamo knows.
POOL_MEDIUM = "GPU"
_MEDIA = {"host": "CPU_PINNED", "disk": "DISK", "store": "EXTERNAL"}
# Tenants whose unsalted blocks are public: that of an open server, and the one that all keys share.
_PUBLIC = ("", "public")


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks stored in the cache; field order is vLLM's.

    Attributes:
        token_ids: tokens of all blocks.
        lora_id, lora_name: always None; vLLM's consumers require both keys.
        extra_keys: for each block, what its hash depends on beside tokens: the salt, in a sequence's first block.
        cache_salt: the salt, for consumers that read SGLang's field.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks removed from the cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The cache is empty. Sent once at the start, to consumers that have seen an earlier engine."""


class EventBatch(msgspec.Struct, array_like=True):
    """The events of one tenant in one step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class EventPublisher:
    """Publishes events on a PUB socket, and replays the latest batches.

    Args:
        config: endpoints of both sockets, the block size, and whose blocks are published.

    Raises:
        ModelError: if an endpoint cannot be bound.
    """

    def __init__(self, config: CacheConfig):
        self._config = config
        self._context = zmq.Context()
        self._publish = self._context.socket(zmq.PUB)
        self._kept = Kept()
        self._bind(self._publish, config.events_endpoint)
        if config.replay_endpoint:
            socket = Replays.open_socket(self._context)
            self._bind(socket, config.replay_endpoint)
            Replays(socket, self._kept)
        self._encode = msgspec.msgpack.Encoder().encode
        self._send("", [AllBlocksCleared()])

    def _bind(self, socket: zmq.Socket, endpoint: str) -> None:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ModelError(f"--kv-events {endpoint}: {error}") from None

    def publish(self, events: Sequence[Event], tier: str | None = None) -> None:
        """Send a batch for each tenant under its topic.

        `tier`: the tier of the events; None: the pool.
        """
        medium = POOL_MEDIUM if tier is None else _MEDIA[tier]
        if self._config.kv_events_of == "public":
            events = [event for event in events if _is_public(event.namespace)]
        topics = self._config.kv_events_of != "hashes"
        for topic, own in groupby(events, lambda event: event.namespace.tenant if topics else ""):
            self._send(topic, [self._wire(event, medium) for event in own])

    def _wire(self, event: Event, medium: str) -> BlockStored | BlockRemoved:
        if not isinstance(event, Stored):
            return BlockRemoved(list(event.hashes), medium)
        stored = (list(event.hashes), event.parent)
        if self._config.kv_events_of == "hashes":
            return BlockStored(*stored, [], self._config.page_size, None, medium, None)
        # The last page of an entry is filled up with -1. Tokens of images are other negative numbers; consumers read
        # tokens as unsigned.
        tokens = [token & 0xFFFFFFFF for token in array("i", event.tokens) if token != -1]
        salt = _salt(event.namespace)
        extra: list[list[str] | None] | None = None
        if salt and event.parent is None:
            extra = [[salt]] + [None] * (len(event.hashes) - 1)
        return BlockStored(*stored, tokens, self._config.page_size, None, medium, None, extra, salt)

    def _send(self, topic: str, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        payload = self._encode(EventBatch(time.time(), events))
        number = self._kept.add(payload, topic)
        self._publish.send_multipart([topic.encode(), number.to_bytes(8, "big"), payload])

    def erase(self, tenant: str) -> None:
        """Drop the kept batches with a tenant's tokens."""
        if self._config.kv_events_of != "hashes":
            self._kept.drop(tenant)

    def close(self) -> None:
        self._publish.close(linger=0)
        self._context.term()  # waits for the thread of replays


def _is_public(namespace: Namespace) -> bool:
    return namespace.tenant in _PUBLIC and not namespace.salt and not namespace.adapter


def _salt(namespace: Namespace) -> str | None:
    """A salt that is unique to the namespace, for consumers that hash tokens themselves; None: the public namespace.

    Without tenant, entry and adapter, it is the client's salt.
    """
    tenant, salt, entry, adapter = namespace
    if adapter:
        return f"{tenant}/{salt}#{entry}@{adapter}"
    return f"{tenant}/{salt}#{entry}" if tenant or entry else salt or None
