"""A real Redis or Valkey server of one's own."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from loadgen.http.local_server import free_port

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


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as client:
            client.sendall(b"PING\r\n")
            if client.recv(1):  # a refusal will do
                return
        time.sleep(0.01)
    raise RuntimeError(f"{PROGRAM} did not start on port {port}")
