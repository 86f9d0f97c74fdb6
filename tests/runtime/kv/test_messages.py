"""KV events on the wire: every field of a message, and replays, over sockets without an engine."""

from __future__ import annotations

import threading
import time
from array import array
from socket import socket as Socket

import msgspec
import pytest
import zmq

from radix import Namespace, Removed, Stored
from runtime.errors import ModelError
from runtime.kv.publisher import EventPublisher

STORED = Stored((5, 6), None, array("i", [0, 1, 2, 3]).tobytes(), Namespace())
CHILD = Stored((7,), 6, array("i", [8, 9]).tobytes(), Namespace())
END = -1


class Wire:
    """A publisher, a subscriber that is there from the second message on, and a socket that asks for replays."""

    def __init__(self, tmp_path, with_tokens: bool = True):
        events, replay = f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"
        self.context = zmq.Context()
        self.publisher = EventPublisher(events, replay, 2, "GPU", with_tokens)
        self.heard = self.context.socket(zmq.SUB)
        self.heard.setsockopt(zmq.SUBSCRIBE, b"")
        self.heard.connect(events)
        self.asks = self.context.socket(zmq.DEALER)
        self.asks.connect(replay)

    def receive(self, socket: zmq.Socket) -> tuple[int, list]:
        assert socket.poll(5000)
        empty, number, payload = socket.recv_multipart()
        assert (empty, len(number)) == (b"", 8)
        events = msgspec.msgpack.decode(payload)[1] if payload else []
        return int.from_bytes(number, "big", signed=True), events

    def replay(self, *request: bytes) -> None:
        self.asks.send_multipart([b"", *request])
        assert self.publisher._replay.poll(5000)
        self.publisher.answer_replays()

    def replayed(self, first: int) -> list[int]:
        self.replay(first.to_bytes(8, "big"))
        numbers = [self.receive(self.asks)[0]]
        while numbers[-1] != END:
            numbers.append(self.receive(self.asks)[0])
        return numbers

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
    while wire.heard.poll(20):
        wire.heard.recv_multipart()


def test_every_field_of_a_message(wire):
    listen(wire)
    number = wire.publisher._next
    wire.publisher.publish([STORED, CHILD, Removed((6, 7))])
    wire.publisher.publish([])
    wire.publisher.publish([Removed((5,))])
    assert wire.receive(wire.heard) == (
        number,
        [
            ["BlockStored", [5, 6], None, [0, 1, 2, 3], 2, None, "GPU"],
            ["BlockStored", [7], 6, [8, 9], 2, None, "GPU"],
            ["BlockRemoved", [6, 7], "GPU"],
        ],
    )
    assert wire.receive(wire.heard) == (number + 1, [["BlockRemoved", [5], "GPU"]]), "no message is empty"


def test_a_message_tells_its_time(wire):
    before = time.time()
    wire.publisher.publish([STORED])
    _, payload = wire.publisher._kept[-1]
    assert before <= msgspec.msgpack.decode(payload)[0] <= time.time()


def test_an_error_gives_the_first_endpoint_free():
    with Socket() as taken:
        taken.bind(("127.0.0.1", 0))
        free = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ModelError) as failed:  # whose traceback keeps the publisher
        EventPublisher(free, "ipc:///no/such/place", 2, "CPU", True)
    EventPublisher(free, None, 2, "CPU", True).close()
    assert failed.value.message.startswith("--kv-events-replay")


def test_without_tokens_nobody_learns_any(tmp_path):
    wire = Wire(tmp_path, with_tokens=False)
    wire.publisher.publish([STORED])
    wire.replay((1).to_bytes(8, "big"))
    assert wire.receive(wire.asks) == (1, [["BlockStored", [5, 6], None, [], 2, None, "GPU"]])
    wire.close()


def test_replays_begin_where_they_are_asked_to(wire):
    for _ in range(3):
        wire.publisher.publish([STORED])
    assert wire.replayed(0) == [0, 1, 2, 3, END]
    assert wire.replayed(2) == [2, 3, END]
    assert wire.replayed(9) == [END]
    wire.replay((-1).to_bytes(8, "big", signed=True))
    assert [wire.receive(wire.asks)[0] for _ in range(5)] == [0, 1, 2, 3, END]
    wire.replay((0).to_bytes(8, "big"))
    assert wire.receive(wire.asks) == (0, [["AllBlocksCleared"]]), "consumers forget an earlier engine's first"


def test_a_malformed_request_is_passed_over(wire):
    wire.replay(b"short")
    wire.replay(b"too long by far")
    assert wire.replayed(0) == [0, END]
    wire.asks.send_multipart([b"", b"short"])
    wire.asks.send_multipart([b"", (0).to_bytes(8, "big")])
    while not wire.asks.poll(20):
        wire.publisher.publish([])
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
    ends.join(10)
    assert not ends.is_alive()
    wire.context.destroy(linger=0)


def test_old_messages_are_forgotten(wire):
    assert wire.publisher._kept.maxlen == 10_000


def test_no_replays_without_an_endpoint_and_a_clear_error_for_a_bad_one(tmp_path):
    publisher = EventPublisher(f"ipc://{tmp_path}/only", None, 2, "CPU", True)
    publisher.publish([STORED])
    publisher.close()
    with pytest.raises(ModelError, match="--kv-events-replay ipc://"):
        EventPublisher(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/no/such/place", 2, "CPU", True)
    with pytest.raises(ModelError, match="--kv-events ipc://"):
        EventPublisher(f"ipc://{tmp_path}/no/such/place", None, 2, "CPU", True)
