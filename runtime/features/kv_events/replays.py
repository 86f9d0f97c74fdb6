"""Replays of KV events for consumers that missed some, in a thread of their own."""

import threading
import time
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

KEPT_BATCHES = 10_000
END = -1
# Messages of one turn, and the pause behind it: a flood of requests takes a fifth of a core at most.
_TURN, _PAUSE_S = 32, 0.002
# Messages that wait in a consumer's connection, and bytes of a request, which has 8.
_QUEUED, _REQUEST_BYTES = 100, 256
# Most connections with which a replay may begin: batches may wait in each of them.
_MOST = 64


class Kept:
    """The last batches. One thread adds them, any other reads them.

    Attributes:
        next: the number of the next batch.
    """

    def __init__(self) -> None:
        self._batches: dict[int, tuple[str, bytes]] = {}  # topic and payload
        self.next = 0

    def add(self, payload: bytes, topic: str) -> int:
        """Keep a batch; returns its number."""
        number = self.next
        self._batches[number] = topic, payload
        self.next += 1
        self._batches.pop(number - KEPT_BATCHES, None)
        return number

    def drop(self, topic: str) -> None:
        """Drop the batches of a topic."""
        for number in [number for number, (its, _) in self._batches.items() if its == topic]:
            del self._batches[number]

    def read(self, number: int) -> tuple[int, bytes]:
        """The first kept batch from `number` on, with its number; (END, b"") behind the last."""
        while (number := max(number, self.next - KEPT_BATCHES, 0)) < self.next:
            if (batch := self._batches.get(number)) is not None:  # it may have been dropped
                return number, batch[1]
            number += 1
        return END, b""


class Replays:
    """Answers replay requests.

    A consumer has one replay at a time, which its next request replaces. Consumers take turns. One whose connection is
    full misses its turn, and no batch, unless the batch is dropped meanwhile: then the numbers have a gap. A replay
    ends behind the last batch of all. While there are too many connections, replays of further consumers end at once.

    Args:
        socket: ROUTER, made by `open_socket` and bound. Its context ends the thread, which closes the socket.
        kept: the batches.
    """

    def __init__(self, socket: zmq.Socket, kept: Kept):
        self._socket, self._kept = socket, kept
        self._changes = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._poller, self._connections = zmq.Poller(), 0
        for each in (socket, self._changes):
            self._poller.register(each, zmq.POLLIN)
        self._wanted: dict[bytes, int] = {}  # the next batch of each consumer
        threading.Thread(target=self._run, name="ramet-replays", daemon=True).start()

    @staticmethod
    def open_socket(context: zmq.Context) -> zmq.Socket:
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else a full connection loses messages without an error
        socket.setsockopt(zmq.SNDHWM, _QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def _run(self) -> None:
        with suppress(zmq.ContextTerminated), self._socket, self._changes:
            while True:
                self._take_requests(0 if self._wanted else None)
                turns = sum(self._send(consumer) for consumer in list(self._wanted))
                time.sleep(_PAUSE_S * max(turns, 1))

    def _take_requests(self, wait_ms: int | None) -> None:
        self._poller.poll(wait_ms)
        requests = []
        with suppress(zmq.Again):
            for _ in range(_TURN):
                requests.append(self._socket.recv_multipart(zmq.NOBLOCK))
        while self._changes.poll(0):  # behind the requests, whose connections are among them
            opened = recv_monitor_message(self._changes)["event"] == zmq.EVENT_ACCEPTED
            self._connections += 1 if opened else -1
        for consumer, *_, start in requests:
            if len(start) == 8:
                begins = consumer in self._wanted or self._connections <= _MOST
                self._wanted[consumer] = int.from_bytes(start, "big", signed=True) if begins else self._kept.next

    def _send(self, consumer: bytes) -> bool:
        """Send a consumer some batches; whether its connection took any."""
        at = first = self._wanted.pop(consumer)
        try:
            for _ in range(_TURN):
                number, payload = self._kept.read(at)
                message = [consumer, b"", number.to_bytes(8, "big", signed=True), payload]
                self._socket.send_multipart(message, zmq.NOBLOCK)
                if number == END:
                    return True
                at = number + 1
        except zmq.ContextTerminated:
            raise
        except zmq.Again:
            pass
        except zmq.ZMQError:
            return False  # the consumer has left
        self._wanted[consumer] = at
        return at > first
