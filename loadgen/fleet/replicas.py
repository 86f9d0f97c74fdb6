"""Servers with a small random model, whose answers cost little, and which count as real ones do."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from loadgen.http.local_server import SMALL_MODEL, free_port, serve_command, wait_ready

# A page is a block of the shortened trace.
PAGE = 16


@dataclass(frozen=True)
class Replica:
    """A server: its process, URL, and the endpoints of its KV events."""

    process: subprocess.Popen[bytes]
    url: str
    events: str
    replay: str

    def kill(self) -> None:
        """End it without a warning, as a machine does that fails."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@dataclass(frozen=True)
class Counts:
    """Prompt tokens that a server has looked up, and those that it had cached."""

    queried: int
    cached: int

    @property
    def computed(self) -> int:
        return self.queried - self.cached

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.queried - other.queried, self.cached - other.cached)


def make_model(directory: Path, tokenizer: Path) -> Path:
    """A directory with a small configuration and the tokenizer of another model, for random weights."""
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SMALL_MODEL))
    for path in tokenizer.glob("tokenizer*.json"):
        shutil.copy(path, model)
    return model


def engine_options(model: Path, pool_tokens: int, more: Sequence[str] = ()) -> list[str]:
    """Options of `ramet serve` that all replicas share. float32, so that all give the same answers."""
    fixed = [
        "--model",
        str(model),
        "--random-weights",
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--log-level",
        "warning",
    ]
    return [*fixed, "--log-level", "error", "--page-size", str(PAGE), "--pool-tokens", str(pool_tokens), *more]


def start_replicas(number: int, options: Sequence[str]) -> list[Replica]:
    """Servers of `engine_options` that are ready. Raises RuntimeError if one ends, or is not ready in time."""
    begun = []
    for _ in range(number):
        port, events, replay = free_port(), *(f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        published = ["--kv-events", events, "--kv-events-replay", replay, "--kv-events-of", "all"]
        process = subprocess.Popen([*serve_command(port), *options, *published])
        begun.append(Replica(process, f"http://127.0.0.1:{port}", events, replay))
    try:
        for replica in begun:
            wait_ready(replica.url, replica.process)
    except BaseException:
        stop(begun)
        raise
    return begun


def stop(replicas: Sequence[Replica]) -> None:
    """End the servers that still run."""
    for replica in replicas:
        replica.process.terminate()
    for replica in replicas:
        end(replica.process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and then make it."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def running_replicas(number: int, options: Sequence[str]) -> Iterator[list[Replica]]:
    """The same, until the end of the block; those that are added to the list end with it."""
    replicas = start_replicas(number, options)
    try:
        yield replicas
    finally:
        stop(replicas)


def flush(replicas: Sequence[Replica]) -> None:
    """Empty the caches."""
    for replica in replicas:
        httpx.post(f"{replica.url}/flush_cache", timeout=60, trust_env=False).raise_for_status()


def counts(url: str) -> tuple[str, Counts]:
    """The endpoint of a server's events, which no other one has, and its counts so far."""
    answer = httpx.get(f"{url}/server_info", timeout=60, trust_env=False).raise_for_status().json()
    state = answer["state"]
    return answer["config"]["cache"]["kv_events"], Counts(state["queried_tokens"], state["cached_tokens"])


def loaded_tokens(url: str) -> int:
    """Tokens whose KV a server has loaded from its tiers."""
    answer = httpx.get(f"{url}/server_info", timeout=60, trust_env=False).raise_for_status().json()
    return sum(answer["state"]["loaded_tokens_by_tier"].values())
