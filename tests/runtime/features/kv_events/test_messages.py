"""KV events on the wire: every field of a message, and replays, over sockets without an engine."""

import threading
import time
from array import array
from itertools import pairwise
from socket import socket as Socket

import msgspec
import pytest
import zmq

from radix import Namespace, Removed, Stored
from runtime.config import CacheConfig
from runtime.errors import ModelError
from runtime.features.kv_events import replays
from runtime.features.kv_events.publisher import EventPublisher

STORED = Stored((5, 6), None, array("i", [0, 1, 2, 3]).tobytes(), Namespace())
CHILD = Stored((7,), 6, array("i", [8, 9]).tobytes(), Namespace())
END = -1


class Wire:
    """A publisher, a subscriber that is there from the second message on, and a socket that asks for replays."""

    def __init__(self, tmp_path, **options):
        events, replay = f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"
        self.replay_endpoint = replay
        self.context = zmq.Context()
        self.publisher = EventPublisher(CacheConfig(kv_events=f"{events},{replay}", page_size=2, **options))
        self.heard = self.context.socket(zmq.SUB)
        self.heard.setsockopt(zmq.SUBSCRIBE, b"")
        self.heard.connect(events)
        self.asks = self.context.socket(zmq.DEALER)
        self.asks.connect(replay)

    def receive(self, socket: zmq.Socket) -> tuple[int, list]:
        assert socket.poll(60_000)
        self.topic, number, payload = socket.recv_multipart()
        assert len(number) == 8
        events = msgspec.msgpack.decode(payload)[1] if payload else []
        return int.from_bytes(number, "big", signed=True), events

    def replay(self, *request: bytes) -> None:
        self.asks.send_multipart([b"", *request])

    def replayed(self, first: int) -> list[int]:
        self.replay(first.to_bytes(8, "big"))
        return self.answer(self.asks)

    def answer(self, asks: zmq.Socket) -> list[int]:
        """The numbers of one replay."""
        numbers = [self.receive(asks)[0]]
        while numbers[-1] != END:
            numbers.append(self.receive(asks)[0])
        return numbers

    def slow(self) -> zmq.Socket:
        """A consumer that has asked for everything, and of whose answer hardly anything fits into its connection."""
        asks = self.context.socket(zmq.DEALER)
        asks.setsockopt(zmq.RCVHWM, 1)
        asks.setsockopt(zmq.LINGER, 0)
        asks.connect(self.replay_endpoint)
        asks.send_multipart([b"", (0).to_bytes(8, "big")])
        return asks

    def close(self) -> None:
        self.publisher.close()
        self.context.destroy(linger=0)


@pytest.fixture
def wire(tmp_path):
    wire = Wire(tmp_path)
    yield wire
    wire.close()


def listen(wire: Wire) -> None:
    """Publish until the subscriber hears."""
    while not wire.heard.poll(20):
        wire.publisher.publish([STORED])
    while wire.receive(wire.heard)[0] < wire.publisher._kept.next - 1:
        pass


def stored(hashes: list[int], parent: int | None, tokens: list[int], **more) -> dict:
    """A block on the wire."""
    common = {"type": "BlockStored", "lora_id": None, "medium": "GPU", "lora_name": None, "block_size": 2}
    return {**common, "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, **more}


def removed(*hashes: int) -> dict:
    return {"type": "BlockRemoved", "block_hashes": [*hashes], "medium": "GPU"}


def test_every_field_of_a_message(wire):
    listen(wire)
    number = wire.publisher._kept.next
    wire.publisher.publish([STORED, CHILD, Removed((6, 7), Namespace())])
    wire.publisher.publish([])
    wire.publisher.publish([Removed((5,), Namespace())])
    blocks = [stored([5, 6], None, [0, 1, 2, 3]), stored([7], 6, [8, 9])]
    assert wire.receive(wire.heard) == (number, [*blocks, removed(6, 7)])
    assert wire.topic == b""
    assert wire.receive(wire.heard) == (number + 1, [removed(5)]), "no message is empty"


# Blocks of one tenant, of a salt, and of an entry, beside everybody's.
OWN, SALTED = Namespace("acme", "s"), Namespace("", "s")
ENTRY = Namespace("public", "", "module:1")
BLOCKS = [
    Stored((n, n + 1), None, array("i", [n] * 4).tobytes(), space)
    for n, space in ((10, OWN), (20, SALTED), (30, ENTRY))
]
LATER = Stored((12,), 11, array("i", [9, 9]).tobytes(), OWN)


def test_tokens_of_tenants_and_of_salts_stay_here(wire):
    listen(wire)
    number = wire.publisher._kept.next
    wire.publisher.publish([*BLOCKS[:2], LATER, Removed((12,), OWN), Removed((20,), SALTED)])
    wire.publisher.publish([STORED, BLOCKS[0], BLOCKS[2]])
    heard = [stored([5, 6], None, [0, 1, 2, 3])]
    assert wire.receive(wire.heard) == (number, heard)
    shared = stored([30, 31], None, [30] * 4, extra_keys=[["public/#module:1"], None], cache_salt="public/#module:1")
    assert wire.receive(wire.heard) == (number + 1, [shared])
    assert wire.topic == b"public"
    assert wire.replayed(number) == [number, number + 1, END], "nor are they replayed"


def test_those_who_may_know_all_get_a_topic_for_each_tenant(tmp_path):
    wire = Wire(tmp_path, kv_events_of="all")
    listen(wire)
    number = wire.publisher._kept.next
    wire.publisher.publish([STORED, BLOCKS[0], LATER, Removed((12,), OWN), BLOCKS[1]])
    assert wire.receive(wire.heard) == (number, [stored([5, 6], None, [0, 1, 2, 3])])
    first = stored([10, 11], None, [10] * 4, extra_keys=[["acme/s#"], None], cache_salt="acme/s#")
    later = stored([12], 11, [9, 9], cache_salt="acme/s#")
    assert wire.receive(wire.heard) == (number + 1, [first, later, removed(12)])
    assert wire.topic == b"acme"
    salted = stored([20, 21], None, [20] * 4, extra_keys=[["s"], None], cache_salt="s")
    assert wire.receive(wire.heard) == (number + 2, [salted]), "a salt is as the client sent it"
    wire.close()


def test_blocks_of_adapters_are_not_the_models(tmp_path):
    space = Namespace(adapter="ab")
    blocks = Stored((40,), None, array("i", [4, 4]).tobytes(), space)
    for given, shown in (
        ("public", []),
        ("all", [stored([40], None, [4, 4], extra_keys=[["/#@ab"]], cache_salt="/#@ab"), removed(40)]),
    ):
        (tmp_path / given).mkdir()
        wire = Wire(tmp_path / given, kv_events_of=given)
        listen(wire)
        number = wire.publisher._kept.next
        wire.publisher.publish([blocks, Removed((40,), space), STORED])
        assert wire.receive(wire.heard) == (number, [*shown, stored([5, 6], None, [0, 1, 2, 3])])
        wire.close()


def test_hashes_alone_tell_neither_tokens_nor_salts_nor_tenants(tmp_path):
    wire = Wire(tmp_path, kv_events_of="hashes")
    listen(wire)
    number = wire.publisher._kept.next
    wire.publisher.publish([STORED, BLOCKS[0], Removed((10,), OWN)])
    blocks = [stored([5, 6], None, []), stored([10, 11], None, [])]
    assert wire.receive(wire.heard) == (number, [*blocks, removed(10)])
    assert wire.topic == b""
    wire.close()


@pytest.mark.parametrize(("tier", "medium"), [("host", "CPU_PINNED"), ("disk", "DISK"), ("store", "EXTERNAL")])
def test_the_tiers_have_words_of_their_own(wire, tier, medium):
    listen(wire)
    number = wire.publisher._kept.next
    wire.publisher.publish([CHILD, Removed((7,), Namespace())], tier)
    events = [stored([7], 6, [8, 9], medium=medium), removed(7) | {"medium": medium}]
    assert wire.receive(wire.heard) == (number, events)


def test_a_message_tells_its_time(wire):
    before = time.time()
    wire.publisher.publish([STORED])
    _, payload = wire.publisher._kept.read(1)
    assert before <= msgspec.msgpack.decode(payload)[0] <= time.time()


def test_an_error_gives_the_first_endpoint_free():
    with Socket() as taken:
        taken.bind(("127.0.0.1", 0))
        free = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ModelError) as failed:  # whose traceback keeps the publisher
        EventPublisher(CacheConfig(kv_events=f"{free},ipc:///no/such/place"))
    EventPublisher(CacheConfig(kv_events=free)).close()
    assert failed.value.message.startswith("--kv-events ipc:///no/such/place")


def test_replays_begin_where_they_are_asked_to(wire):
    for _ in range(3):
        wire.publisher.publish([STORED])
    assert wire.replayed(0) == [0, 1, 2, 3, END]
    assert wire.replayed(2) == [2, 3, END]
    assert wire.replayed(9) == [END]
    wire.replay((-1).to_bytes(8, "big", signed=True))
    assert [wire.receive(wire.asks)[0] for _ in range(5)] == [0, 1, 2, 3, END]
    wire.replay((0).to_bytes(8, "big"))
    assert wire.receive(wire.asks) == (0, [{"type": "AllBlocksCleared"}]), "consumers forget an earlier engine's first"


def test_a_malformed_request_is_passed_over(wire):
    wire.replay(b"short")
    wire.replay(b"too long by far")
    assert wire.replayed(0) == [0, END]
    wire.asks.send_multipart([b"", b"short"])
    wire.asks.send_multipart([b"", (0).to_bytes(8, "big")])
    assert [wire.receive(wire.asks)[0] for _ in range(2)] == [0, END], "those behind it are answered, too"


def test_the_end_waits_for_no_consumer_that_does_not_read(tmp_path):
    wire = Wire(tmp_path)
    for socket, name in ((wire.heard, "e"), (wire.asks, "r")):
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.disconnect(f"ipc://{tmp_path}/{name}")
        socket.connect(f"ipc://{tmp_path}/{name}")
    listen(wire)
    large = Stored(tuple(range(1000)), None, b"", Namespace())
    for _ in range(800):
        wire.publisher.publish([large])
    wire.replay((0).to_bytes(8, "big"))
    ends = threading.Thread(target=wire.publisher.close, daemon=True)
    ends.start()
    ends.join(60)
    assert not ends.is_alive()
    wire.context.destroy(linger=0)


KEPT = 10_000


def fill(wire: Wire) -> None:
    """Publish batches until five have been dropped again."""
    while wire.publisher._kept.next < KEPT + 5:
        wire.publisher.publish([STORED])


def test_all_kept_batches_arrive_whatever_another_consumer_does(wire):
    """The first number tells which ones are no longer kept."""
    fill(wire)
    slow = wire.slow()
    slow.poll()  # its replay has begun
    assert wire.replayed(0) == [*range(5, KEPT + 5), END]
    assert wire.answer(slow) == [*range(5, KEPT + 5), END]


def test_batches_that_are_dropped_during_a_replay_leave_a_gap(wire):
    fill(wire)
    slow = wire.slow()
    slow.poll()
    for _ in range(KEPT):
        wire.publisher.publish([STORED])
    *numbers, end = wire.answer(slow)
    assert (numbers[0], numbers[-1], end) == (5, 2 * KEPT + 4, END)
    assert all(a < b for a, b in pairwise(numbers))
    assert len(numbers) < 2 * KEPT


def test_batches_wait_for_a_limited_number_of_consumers(wire, monkeypatch):
    """A replay under way goes on; those of further consumers end at once until one leaves."""
    monkeypatch.setattr(replays, "_MOST", 2)
    fill(wire)
    slow = wire.slow()
    slow.poll()
    assert wire.replayed(0)[0] == 5
    third = wire.slow()
    assert wire.answer(third) == wire.replayed(0) == [END]
    assert wire.answer(slow) == [*range(5, KEPT + 5), END]
    third.close()
    while (numbers := wire.replayed(KEPT)) == [END]:  # until it has left
        pass
    assert numbers == [*range(KEPT, KEPT + 5), END]


def test_no_replays_without_an_endpoint_and_a_clear_error_for_a_bad_one(tmp_path):
    publisher = EventPublisher(CacheConfig(kv_events=f"ipc://{tmp_path}/only"))
    publisher.publish([STORED])
    publisher.close()
    with pytest.raises(ModelError, match=r"--kv-events ipc://.*/no/such/place"):
        EventPublisher(CacheConfig(kv_events=f"ipc://{tmp_path}/e,ipc://{tmp_path}/no/such/place"))
    with pytest.raises(ModelError, match="--kv-events ipc://"):
        EventPublisher(CacheConfig(kv_events=f"ipc://{tmp_path}/no/such/place"))


def test_of_an_erased_topic_no_kept_batch_is_read(monkeypatch):
    """Also when older batches are no longer kept, and new ones are added later."""
    monkeypatch.setattr(replays, "KEPT_BATCHES", 4)
    kept = replays.Kept()
    for number, topic in enumerate("aababb"):
        assert kept.add(b"%d" % number, topic) == number
    kept.drop("a")
    kept.add(b"6", "a")
    found = [kept.read(at) for at in range(8)]
    assert found == [*[(4, b"4")] * 5, (5, b"5"), (6, b"6"), (replays.END, b"")]
