"""Bounds on connections over real sockets, before an application that waits when it is told to."""

import asyncio
import contextlib
import gc
import http.client
import os
import resource
import socket
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn
from uvicorn.server import ServerState

from runtime.config import SchedulerConfig
from server.http import listener
from server.http.admission import AdmissionMiddleware
from server.http.connections import HttpConnection
from server.http.limits import BodyLimit
from server.http.listener import Listener, TooFewDescriptors, most_connections

# An address may have 8 of them.
MOST = 16


class Served:
    """A listener whose event loop runs in a thread."""

    def __init__(self):
        self.release = threading.Event()
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
        for task in (left := asyncio.all_tasks(self.loop)):
            task.cancel()
        if left:
            self.loop.run_until_complete(asyncio.wait(left))
        self.loop.close()

    async def app(self, scope, receive, send):
        while scope["path"] == "/wait" and not self.release.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})

    async def accept(self):
        config = uvicorn.Config(
            AdmissionMiddleware(self.app, (), BodyLimit(5.0), bool), lifespan="off", log_config=None
        )
        config.load()
        state, loop = ServerState(), asyncio.get_running_loop()

        def connect(on_end):
            return HttpConnection(on_end, 30.0, {}, config=config, server_state=state, _loop=loop)

        await Listener(self.socket, connect, MOST).accept()

    def open(self, path="", source="127.0.0.1"):
        """A connection, silent or with a request whose answer is unread."""
        self.opened.append(socket.create_connection(self.address, timeout=30, source_address=(source, 0)))
        if path:
            ask(self.opened[-1], path)
        return self.opened[-1]

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


def is_served(connection):
    """Whether the server answers on a connection on which it owes nothing; False: it has closed it."""
    try:
        ask(connection, "/health")
        return status_of(connection) == 200
    except ConnectionError:
        return False


def test_over_a_limit_new_connections_are_closed(served):
    """An address may have eight of sixteen; those that have ended make room."""
    first, second, third = "127.0.0.1", "127.0.0.2", "127.0.0.3"
    opened = [served.open("/wait", first), *(served.open(source=first) for _ in range(7))]
    assert not is_served(served.open(source=first))
    assert status_of(served.open("/health", second)) == 200
    opened += [served.open(source=second) for _ in range(7)]
    assert not is_served(served.open(source=third)), "all sixteen are open"
    assert [is_served(connection) for connection in opened[1:]] == [True] * 14
    opened[-1].close()
    while not is_served(served.open(source=third)):
        pass
    served.release.set()
    assert status_of(opened[0]) == 200


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
    pauses, pause = [], asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: pauses.append(seconds) or pause(seconds))
    clients = [socket.socket() for _ in range(3)]
    served.opened += clients
    with no_descriptors():
        for connection in clients:
            connection.connect(served.address)
            ask(connection, "/health")
        pauses.clear()
        while len(pauses) < 4:
            time.sleep(0.01)
        assert {*pauses} == {0.05}, "it does not spin"
    assert [status_of(connection) for connection in clients] == [200] * 3
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ramet.server"]
    assert "Too many open files" in line


@pytest.fixture
def limits(monkeypatch):
    """Sets the limits that are seen, and returns the soft one that was set."""
    set_to = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: set_to.append(pair))

    def limits(soft, hard):
        set_to.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        return set_to

    return limits


def test_connections_follow_from_descriptors(limits):
    plain = SchedulerConfig(max_running=10, max_waiting=90)
    assert limits(1024, 4096) == []
    assert most_connections(plain) == 200
    raised = limits(256, 4096)
    assert most_connections(plain) == 200
    assert raised == [(328, 4096)]
    raised = limits(256, resource.RLIM_INFINITY)
    assert most_connections(SchedulerConfig(max_running=100, max_waiting=2400)) == 5000
    assert raised == [(5128, resource.RLIM_INFINITY)]
    few = SchedulerConfig(max_running=2, max_waiting=1)
    assert most_connections(few) == 16, "health must be answered beside six requests"
    limits(256, 300)
    assert most_connections(plain) == 172
    limits(64, 143)
    with pytest.raises(TooFewDescriptors, match="`ulimit -Hn` is 143"):
        most_connections(plain)
