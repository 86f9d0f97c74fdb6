"""A real Redis or Valkey server of one's own, and a slow way to it."""

from __future__ import annotations

import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
_START_S = 60.0


class RedisServer(NamedTuple):
    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


@contextmanager
def running_redis(*options: str, port: int = 0) -> Iterator[RedisServer]:
    """A server on 127.0.0.1 that keeps nothing on a disk, until the end of the block.

    Args:
        options: of `redis-server`.
        port: 0: a free one.

    Raises:
        RuntimeError: if no server is installed (Debian: `valkey-server` or `redis-server`), or it does not start.
    """
    if PROGRAM is None:
        raise RuntimeError("neither valkey-server nor redis-server is installed")
    port = port or free_port()
    with tempfile.TemporaryDirectory() as directory:
        command = [PROGRAM, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", directory, *options]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            _wait_for(process, port)
            yield RedisServer(process, port)
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as client:
            client.sendall(b"PING\r\n")
            if client.recv(1):  # a refusal will do
                return
        time.sleep(0.01)
    raise RuntimeError(f"{PROGRAM} did not start on port {port}")


class SlowWay:
    """A TCP proxy on 127.0.0.1 that can be slow, or stall.

    Attributes:
        bytes_per_s: of answers; 0: nothing passes any more, and connections stay open. None: as fast as it can.
    """

    def __init__(self, port: int):
        self.bytes_per_s: float | None = None
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open = True
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while self._open:
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            client, _ = self._listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self._port))
            except ConnectionError:  # as if it were the server that is not there
                client.close()
                continue
            for source, target, is_answer in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pass_on, args=(source, target, is_answer), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while self._open:
                ready = select.select([source], [], [], 0.05)[0]
                rate = self.bytes_per_s
                if rate == 0:
                    time.sleep(0.01)
                if not ready or rate == 0:
                    continue
                rate = rate if is_answer else None
                data = source.recv(max(int(rate / 20), 1) if rate else 1 << 16)
                if not data:
                    break
                target.sendall(data)
                if rate:
                    time.sleep(len(data) / rate)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()

    def close(self) -> None:
        self._open = False
        for thread in self._threads:
            thread.join(10)
        self._listener.close()
