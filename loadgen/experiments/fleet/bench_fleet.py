"""`ramet bench fleet`: hits, balance and lost requests of replicas behind Ray Serve, beside one server."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import Field

from loadgen.experiments.fleet.ray_cluster import RayCluster
from loadgen.harness import Bench, BenchError, Cell, Figure, repeats_of, warmup_of
from loadgen.http.arrivals import Closed
from loadgen.http.load import Bounds
from loadgen.http.local_server import local_server, small_model
from loadgen.http.record import Record
from loadgen.http.run import Plan, execute, prepare
from loadgen.http.target import Target
from loadgen.http.workloads import Workload
from loadgen.http.workloads.base import length
from loadgen.http.workloads.dialogues import Chat
from loadgen.http.workloads.prompts import SharedPrefix

_ONE, _RAY, _KILLED = "one server with all the memory", "Ray Serve", "Ray Serve, a replica is killed"
_TRIES = 200


class Fleet(Bench):
    """Replicas with a small random model behind Ray Serve, and one server with the memory of all."""

    figures = (
        Figure("hit_ratio", "hits, %", factor=100, versus="ratio", plotted=True),
        Figure("imbalance", "computed tokens, busiest / mean", ".2f", plotted=True),
        Figure("failed", "failed requests", ".0f", statistic="sum"),
        Figure("ttft", "TTFT p50, ms", ".0f", factor=1000),
        Figure("ttft", "TTFT p99, ms", ".0f", factor=1000, statistic="p99"),
    )
    sections = "workload"

    repeats: int = repeats_of(3)
    warmup: int = warmup_of(0)
    ray: str | None = Field(None, description="an interpreter that has ramet[ray]; without it, only one server runs")
    replicas: tuple[int, ...] = Field((2, 4), description="replicas behind Ray Serve")
    pool_tokens: int = Field(6144, gt=0, description="pool of each replica")
    workloads: tuple[Literal["prefixes", "chats"], ...] = Field(("prefixes", "chats"), description="requests")

    _model: Path

    @contextmanager
    def session(self) -> Iterator[None]:
        with small_model() as self._model:
            yield

    def baseline(self) -> tuple[str, str]:
        return "servers", _ONE

    def cells(self) -> Iterator[Cell]:
        ways = (_ONE, _RAY, _KILLED) if self.ray else (_ONE,)
        for workload in self.workloads:
            for number in self.replicas:
                for way in ways:
                    yield {"workload": workload, "replicas": number, "servers": way}

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        """Run the requests on new servers, whose caches are empty."""
        workload, users, requests = _workload(cell["workload"])
        with self._servers(cell) as (url, cluster):
            target = Target(cell["servers"], url, "completions")
            plan = Plan(workload, Closed(users), Bounds(requests=requests), seed=draw.randrange(1 << 32))
            prepared, is_killed = prepare(target, fixed_output="ignore_eos"), cell["servers"] == _KILLED
            if is_killed and cluster is not None:
                result = execute(prepared, plan, _Killer(cluster.kill_replica, requests // 2))
            else:
                result = execute(prepared, plan)
            computed = [] if is_killed else _computed(url, cell["replicas"] if cluster else 1)
        imbalance = max(computed) * len(computed) / max(sum(computed), 1) if computed else None
        return {name: result.figures[name] for name in ("hit_ratio", "failed", "ttft")} | {"imbalance": imbalance}

    @contextmanager
    def _servers(self, cell: Cell) -> Iterator[tuple[str, RayCluster | None]]:
        """Start servers. Yields their URL and the Ray cluster, if there is one."""
        pool = self.pool_tokens * (cell["replicas"] if cell["servers"] == _ONE else 1)
        # float32, so that all replicas give the same answers.
        options = ["--model", str(self._model), "--random-weights", "--dtype", "float32", "--threads", "1"]
        options += ["--log-level", "error", "--pool-tokens", str(pool)]
        if cell["servers"] == _ONE or self.ray is None:
            with local_server(options) as url:
                yield url, None
        else:
            with RayCluster(self.ray, cell["replicas"], options) as cluster:
                yield cluster.url, cluster


def _workload(name: str) -> tuple[Workload, int, int]:
    """The workload, the number of users at a time, and the number of requests."""
    answer = length("8")
    if name == "chats":
        prompt = length("lognormal:64:32:8:256")
        return Chat(prefix_tokens=length("256"), prompt_tokens=prompt, output_tokens=answer), 16, 192
    prompt, prefix = length("32"), length("512")
    workload = SharedPrefix(groups=16, questions=6, prefix_tokens=prefix, prompt_tokens=prompt, output_tokens=answer)
    return workload, 8, workload.groups * workload.questions


class _Killer:
    """Kills a replica after some requests have ended, in a thread of its own."""

    def __init__(self, kill: Callable[[], None], after: int):
        self._kill, self._left = kill, after

    def __call__(self, record: Record) -> None:
        self._left -= 1
        if self._left == 0:
            threading.Thread(target=self._kill).start()


def _computed(url: str, number: int) -> list[int]:
    """The prompt tokens that each replica has computed. Raises BenchError if the URL does not reach all replicas."""
    found: dict[str, int] = {}
    for _ in range(_TRIES):
        answer = httpx.get(f"{url}/server_info", timeout=60, trust_env=False).raise_for_status().json()
        state = answer["state"]
        # No two replicas publish their events at the same endpoint.
        found[str(answer["config"]["cache"]["kv_events"])] = state["queried_tokens"] - state["cached_tokens"]
        if len(found) == number:
            return list(found.values())
    raise BenchError(f"{url} reaches {len(found)} of {number} replicas")
