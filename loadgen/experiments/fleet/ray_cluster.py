"""Runs Ray Serve on a new cluster, in a process whose Python has Ray."""

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any, Self

from loadgen.harness import BenchError
from loadgen.http.local_server import free_port


class RayCluster:
    """A context in which a Serve application of replicas runs.

    Args:
        python: the interpreter.
        replicas: their number.
        options: of `ramet serve`, for each.

    Attributes:
        url: of Serve.
    """

    def __init__(self, python: str, replicas: int, options: Sequence[str]):
        self._port = free_port()
        self._python = python
        self._arguments: dict[str, Any] = {"options": shlex.join(options), "replicas": replicas, "cpus": 0.1}
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        command = [self._python, "-m", "loadgen.experiments.fleet.ray_driver", str(self._port)]
        env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
        pipe = subprocess.PIPE
        self._driver = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env)
        try:
            self._call(self._arguments)
        except BaseException:
            self._driver.kill()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._driver.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()

    def kill_replica(self) -> None:
        """Kill one replica; Serve starts another one."""
        self._call(None)

    def _call(self, message: object) -> None:
        """Send a line to the driver and wait for its answer. Raises BenchError if the cluster has ended."""
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        try:
            self._driver.stdin.write(json.dumps(message).encode() + b"\n")
            self._driver.stdin.flush()
        except BrokenPipeError:
            pass
        if b"done\n" not in self._driver.stdout:  # reads up to that line
            raise BenchError(f"Ray Serve has ended; does {self._python} have ramet[ray]?")
