"""Replays of KV events for consumers that missed some, in a thread of their own."""

import threading
import time
from contextlib import suppress

import zmq

KEPT_BATCHES = 10_000
END = -1
# Messages of one turn, and the pause behind it: a flood of requests takes a fifth of a core at most.
_TURN, _PAUSE_S = 32, 0.002
# Messages that wait in a consumer's connection, and bytes of a request, which has 8.
_QUEUED, _REQUEST_BYTES = 100, 256


class Kept:
    """The last batches. One thread adds them, any other reads them.

    Attributes:
        next: the number of the next batch.
    """

    def __init__(self) -> None:
        self._payloads: dict[int, bytes] = {}
        self.next = 0

    def add(self, payload: bytes) -> int:
        """Keep a batch; returns its number."""
        number = self.next
        self._payloads[number] = payload
        self.next += 1
        self._payloads.pop(number - KEPT_BATCHES, None)
        return number

    def read(self, number: int) -> tuple[int, bytes]:
        """The first kept batch from `number` on, with its number; (END, b"") behind the last."""
        while (number := max(number, self.next - KEPT_BATCHES, 0)) < self.next:
            if (payload := self._payloads.get(number)) is not None:  # it may have been dropped meanwhile
                return number, payload
        return END, b""


class Replays:
    """Answers replay requests.

    A consumer has one replay at a time, which its next request replaces. Consumers take turns. One whose connection is
    full misses its turn, and no batch, unless the batch is dropped meanwhile: then the numbers have a gap. A replay
    ends behind the last batch of all.

    Args:
        socket: ROUTER, made by `open_socket` and bound. Its context ends the thread, which closes the socket.
        kept: the batches.
    """

    def __init__(self, socket: zmq.Socket, kept: Kept):
        self._socket, self._kept = socket, kept
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
        with suppress(zmq.ContextTerminated), self._socket:
            while True:
                self._take_requests(0 if self._wanted else None)
                turns = sum(self._send(consumer) for consumer in list(self._wanted))
                time.sleep(_PAUSE_S * max(turns, 1))

    def _take_requests(self, wait_ms: int | None) -> None:
        self._socket.poll(wait_ms)
        with suppress(zmq.Again):
            for _ in range(_TURN):
                consumer, *_, start = self._socket.recv_multipart(zmq.NOBLOCK)
                if len(start) == 8:
                    self._wanted[consumer] = int.from_bytes(start, "big", signed=True)

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
