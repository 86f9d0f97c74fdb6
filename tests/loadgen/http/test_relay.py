"""A relay that is cut, slow, or stalled."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from array import array
from contextlib import suppress

import pytest

from loadgen.http.local_server import free_port
from loadgen.http.relay import Relay
from radix import Namespace, Stored
from runtime.config import CacheConfig
from runtime.kv.publisher import EventPublisher
from server.ray.follower import Follower
from server.ray.prefixes import PrefixIndex


def test_what_is_lost_is_asked_for_once_events_come_again(tmp_path):
    async def scenario(publisher: EventPublisher, relay: Relay) -> None:
        index = PrefixIndex[str]()
        follower = Follower(index, "a", f"tcp://127.0.0.1:{relay.port}", f"ipc://{tmp_path}/replay")

        async def until(blocks: set[int], again: int | None = None) -> None:
            async with asyncio.timeout(60):
                while index.held("a") != blocks:
                    if again is not None:
                        publish(again)
                    publisher.answer_replays()
                    await asyncio.sleep(0.02)

        def publish(block: int) -> None:
            publisher.publish([Stored((block,), None, array("i", [1, 2]).tobytes(), Namespace())])

        await until({1}, again=1)
        relay.cut()
        await asyncio.sleep(0.2)
        publish(2)
        await asyncio.sleep(0.2)
        assert index.held("a") == {1}, "lost on the way"
        relay.mend()
        await until({1, 2, 3}, again=3)
        follower.close()

    port, replay = free_port(), f"ipc://{tmp_path}/replay"
    config = CacheConfig(kv_events=f"tcp://127.0.0.1:{port}", kv_events_replay=replay, page_size=2)
    publisher = EventPublisher(config)
    with Relay(port) as relay:
        asyncio.run(scenario(publisher, relay))
    publisher.close()


@pytest.fixture
def echo():
    """The port of a server that answers a connection at a time with what it reads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):  # the listener's end
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        while data := connection.recv(1 << 16):
                            connection.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def ask(client: socket.socket) -> bytes:
    client.sendall(b"?")
    return client.recv(1)


def test_a_cut_closes_open_connections_at_once_and_new_ones_until_it_mends(echo):
    with Relay(echo) as relay:
        way = ("127.0.0.1", relay.port)
        with socket.create_connection(way, 60) as client:
            assert ask(client) == b"?"
            relay.bytes_per_s = 0
            client.sendall(b"?")  # on the way, and never there
            relay.cut()
            assert is_closed(client)
        relay.bytes_per_s = None
        with socket.create_connection(way, 60) as client:
            assert is_closed(client)
        relay.mend()
        with socket.create_connection(way, 60) as client:
            assert ask(client) == b"?"


def test_answers_take_their_time(echo):
    with Relay(echo) as relay, socket.create_connection(("127.0.0.1", relay.port), 60) as client:
        relay.bytes_per_s = 20
        begun = time.monotonic()
        assert ask(client) == b"?"
        assert time.monotonic() - begun >= 0.04


def test_its_end_closes_what_is_stalled_and_a_target_that_is_not_there_is_a_closed_connection(echo):
    with Relay(echo) as relay:
        client = socket.create_connection(("127.0.0.1", relay.port), 60)
        assert ask(client) == b"?"
        relay.bytes_per_s = 0
        client.sendall(b"?")
    with client:
        assert is_closed(client)
    with Relay(free_port()) as relay, socket.create_connection(("127.0.0.1", relay.port), 60) as client:
        assert is_closed(client)
