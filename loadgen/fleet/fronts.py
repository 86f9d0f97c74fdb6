"""Ways to several replicas, by name: choosers of our own, routers of others, and Ray Serve."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
from aiohttp import ClientSession

from loadgen.fleet.proxy import Chooser, Dynamo, Placed, at_random, in_turn, running_proxy
from loadgen.fleet.replicas import Replica, end
from loadgen.http.local_server import START_SECONDS, free_port

# The interpreter that has each of them, in an environment of its own, by the option that names it.
OTHERS = {"sglang-router": "sglang_router.launch_router", "smg": "smg.launch_router"}
Front = Callable[[Sequence[Replica]], AbstractContextManager[str]]


def fronts(tokenizer: Path, pythons: Mapping[str, str], seed: int) -> dict[str, Front]:
    """Those that can be had, over replicas that run. `pythons`: interpreters by name of OTHERS, and `dynamo`."""

    def own(make: Callable[[], Chooser]) -> Front:
        @contextmanager
        def front(replicas: Sequence[Replica]) -> Iterator[str]:
            with running_proxy(make, tokenizer, replicas) as proxy:
                yield proxy.url

        return front

    found = {"random": own(lambda: at_random(seed)), "round robin": own(in_turn)}
    for name in OTHERS.keys() & pythons.keys():
        found[name] = _router(pythons[name], OTHERS[name])
    if "dynamo" in pythons:
        found["dynamo"] = _dynamo(pythons["dynamo"], tokenizer)
    return found | {"prefix and work": own(lambda: Placed(seed))}


def _router(python: str, module: str) -> Front:
    @contextmanager
    def front(replicas: Sequence[Replica]) -> Iterator[str]:
        port = free_port()
        command = [python, "-m", module, "--worker-urls", *(replica.url for replica in replicas)]
        command += ["--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(free_port()), "--health-check-interval-secs", "1"]
        command += ["--health-success-threshold", "1", "--disable-circuit-breaker", "--log-level", "error"]
        url = f"http://127.0.0.1:{port}"
        with _process(command):
            _until(lambda: _healthy(url) == len(replicas))
            yield url

    return front


def _healthy(url: str) -> int:
    workers = httpx.get(f"{url}/workers", trust_env=False).json()["workers"]
    return sum(bool(worker["is_healthy"]) for worker in workers)


def _dynamo(python: str, tokenizer: Path) -> Front:
    @contextmanager
    def front(replicas: Sequence[Replica]) -> Iterator[str]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with _process([python, "-m", "dynamo.select_service", "--port", str(port), "--threads", "1"]):
            _until(lambda: httpx.get(f"{url}/health", trust_env=False).status_code == 200)
            with running_proxy(lambda: Dynamo(url, ClientSession()), tokenizer, replicas) as proxy:
                yield proxy.url

    return front


class RayCluster:
    """Ray Serve on a cluster of its own, while entered.

    Args:
        python: an interpreter that has Ray.
        number: of replicas.
        options: of `ramet serve`, for each.

    Attributes:
        url: of Serve.
    """

    def __init__(self, python: str, number: int, options: Sequence[str]):
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._python = python
        self._arguments: dict[str, Any] = {"options": shlex.join(options), "replicas": number, "cpus": 0.1}

    def __enter__(self) -> Self:
        command = [self._python, "-m", "loadgen.fleet.ray_driver", str(self._port)]
        env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
        pipe = subprocess.PIPE
        self._driver = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env)
        try:
            self._tell(self._arguments)
        except BaseException:
            end(self._driver)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._driver.communicate(timeout=60)
        finally:
            end(self._driver)

    def kill(self) -> None:
        """End a replica without a warning. Serve starts another one."""
        self._tell(None)

    def grow(self) -> None:
        """One replica more."""
        self._arguments["replicas"] += 1
        self._tell(self._arguments)

    def _tell(self, message: object) -> None:
        """Raises RuntimeError if the cluster is no more."""
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.write(json.dumps(message).encode() + b"\n")
        self._driver.stdin.flush()
        if b"done\n" not in self._driver.stdout:  # up to that line
            raise RuntimeError("Ray Serve has ended")


@contextmanager
def _process(command: Sequence[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        end(process)


def _until(ready: Callable[[], bool]) -> None:
    """Wait for it. Raises RuntimeError if that takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if ready():
                return
        except (httpx.TransportError, ValueError, KeyError):
            pass
        time.sleep(0.3)
    raise RuntimeError(f"a router was not ready within {START_SECONDS} s")
