"""Bounds on connections over real sockets, before an application that waits when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import os
import resource
import socket
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn
from uvicorn.server import ServerState

from server.http import listener
from server.http.admission import AdmissionMiddleware
from server.http.connections import Connection
from server.http.limits import BodyLimit
from server.http.listener import Listener

# An address may have 8 of them, 7 of which may be busy; of all, 14 may.
MOST = 16


class Served:
    """A listener whose event loop runs in a thread."""

    def __init__(self):
        self.release = threading.Event()
        self.waiting = 0
        self.opened: list[socket.socket] = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.address = self.socket.getsockname()
        self.loop = asyncio.new_event_loop()
        self.accepting = self.loop.create_task(self.accept())
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        self.loop.run_until_complete(asyncio.wait((self.accepting,)))
        self.loop.run_until_complete(asyncio.sleep(0.1))
        self.loop.close()

    async def app(self, scope, receive, send):
        self.waiting += scope["path"] == "/wait"
        while scope["path"] == "/wait" and not self.release.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})

    async def accept(self):
        config = uvicorn.Config(AdmissionMiddleware(self.app, (), BodyLimit(1000, 5)), lifespan="off", log_config=None)
        config.load()
        state, loop = ServerState(), asyncio.get_running_loop()

        def connect(slot):
            return Connection(slot, 30.0, {}, config=config, server_state=state, _loop=loop)

        await Listener(self.socket, connect, MOST).accept()

    def open(self, path="", source="127.0.0.1"):
        """A connection, silent or with a request whose answer is unread."""
        self.opened.append(socket.create_connection(self.address, timeout=30, source_address=(source, 0)))
        if path:
            ask(self.opened[-1], path)
        return self.opened[-1]

    def wait(self, count):
        """Until so many requests wait, as the listener takes connections in a thread of its own."""
        deadline = time.monotonic() + 30
        while self.waiting < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self):
        self.release.set()
        for connection in self.opened:
            connection.close()
        self.loop.call_soon_threadsafe(self.accepting.cancel)
        self.thread.join(60)
        self.socket.close()
        assert not self.thread.is_alive()


@pytest.fixture
def served():
    served = Served()
    yield served
    served.close()


def ask(connection, path):
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


def read(connection):
    """The answer on a connection, to its end."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer, answer.read()


def status_of(connection):
    return read(connection)[0].status


def is_open(connection):
    """Whether the server has not closed a connection on which it owes nothing."""
    connection.settimeout(0.2)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False
    finally:
        connection.settimeout(30)


def test_silent_connections_make_room_and_busy_ones_stay(served):
    busy = served.open("/wait")
    idle = served.open("/health")
    assert status_of(idle) == 200
    silent = [served.open() for _ in range(3 * MOST)]
    assert status_of(served.open("/health")) == 200, "which is the eighth of this address"
    assert [is_open(connection) for connection in (idle, *silent)] == [False] * (3 * MOST - 5) + [True] * 6
    ask(silent[-1], "/health")
    assert status_of(silent[-1]) == 200
    served.release.set()
    assert status_of(busy) == 200


def test_requests_leave_places_for_others_and_for_probes(served):
    busy = [served.open("/wait") for _ in range(7)]
    served.wait(7)
    refused, body = read(served.open("/wait"))
    assert (refused.status, refused.getheader("retry-after")) == (503, "1")
    assert json.loads(body)["error"]["type"] == "overloaded_error"
    assert status_of(served.open("/health")) == 200
    busy += [served.open("/wait", "127.0.0.2") for _ in range(7)]
    served.wait(14)
    for source in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
        assert status_of(served.open("/generate", source)) == 503, "14 of 16 are busy"
        assert status_of(served.open("/health", source)) == 200
    served.release.set()
    assert [status_of(connection) for connection in busy] == [200] * 14
    ask(busy[0], "/generate")
    assert status_of(busy[0]) == 200, "their places are free again"


def test_a_body_that_does_not_come_holds_no_place_beyond_the_bound(served):
    """A refusal reads on for a while, and is silent meanwhile."""
    slow = [served.open() for _ in range(MOST)]
    for connection in slow:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{")
    time.sleep(0.1)
    assert status_of(served.open("/health")) == 200


@contextmanager
def no_descriptors():
    """Every descriptor of the process is in use."""
    gc.collect()  # else it might give one back meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 + max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    used = []
    try:
        with contextlib.suppress(OSError):
            while True:
                used.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in used:
            os.close(descriptor)


def test_without_descriptors_it_waits_in_silence(served, caplog, monkeypatch):
    monkeypatch.setattr(listener, "PAUSE_S", 0.05)
    clients = [socket.socket() for _ in range(3)]
    served.opened += clients
    with no_descriptors():
        for connection in clients:
            connection.connect(served.address)
            ask(connection, "/health")
        spent_s = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - spent_s < 0.25, "it does not spin"
        assert [is_open(connection) for connection in clients] == [True] * 3
    assert [status_of(connection) for connection in clients] == [200] * 3
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ramet.server"]
    assert "Too many open files" in line


def test_without_descriptors_a_silent_connection_gives_its_own(served):
    silent = [served.open() for _ in range(4)]
    assert status_of(served.open("/health")) == 200
    client = socket.socket()
    served.opened.append(client)
    with no_descriptors():
        client.connect(served.address)
        ask(client, "/health")
        assert status_of(client) == 200
    # The second one keeps a descriptor free: without one, to accept fails even where nobody waits.
    assert [is_open(connection) for connection in silent] == [False, False, True, True]
