"""The proxy before servers that come and go, and its choosers."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from loadgen.fleet.bench_fleet import _BOUND, _medians
from loadgen.fleet.proxy import Placed, at_random, in_turn, running_proxy
from loadgen.fleet.replicas import Replica
from loadgen.http.local_server import free_port


class Answers(http.server.BaseHTTPRequestHandler):
    """Says which server it is."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = str(self.server.server_address[1]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def server() -> Iterator[Replica]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as one:
        threading.Thread(target=one.serve_forever, args=(0.02,)).start()
        yield replica(one.server_address[1])
        one.shutdown()


def replica(port: int) -> Replica:
    process = subprocess.Popen([sys.executable, "-c", ""])  # ends at once: it stands for no server here
    process.wait()
    return Replica(process, f"http://127.0.0.1:{port}", *(f"tcp://127.0.0.1:{free_port()}" for _ in range(2)))


def ask(url: str, prompt: str = "one two three") -> str:
    return httpx.post(f"{url}/v1/completions", json={"prompt": prompt}, timeout=60, trust_env=False).text


@pytest.mark.parametrize("make", [in_turn, lambda: at_random(0), lambda: Placed(0)])
def test_a_call_goes_on_to_another_server_where_one_is_dead(make, tiny_dir):
    with server() as one, server() as two:
        dead = replica(free_port())
        with running_proxy(make, tiny_dir, [dead, one]) as proxy:
            asked = threading.Thread(target=lambda: found.append(ask(proxy.url)))
            found: list[str] = []
            asked.start()
            proxy.leave(0)
            asked.join(60)
            assert found == [one.url.rpartition(":")[2]]
            proxy.join(two)
            proxy.leave(1)
            assert ask(proxy.url) == two.url.rpartition(":")[2]


def test_a_share_is_of_the_bound_of_the_same_round():
    def row(router: str, number: int, ratio: float) -> dict:
        figures = {"hit_ratio": ratio, "imbalance": 1.0, "ttft_p50_s": 1.0, "ttft_p99_s": 1.0}
        return {"replicas": 2, "workload": "chats", "router": router, "round": number, **figures}

    rows = [row(_BOUND, 0, 0.8), row(_BOUND, 1, 0.5), row("random", 0, 0.4), row("random", 1, 0.1)]
    found = _medians(rows)[2, "chats", "random"]
    assert found["share"] == pytest.approx((0.35, 0.2, 0.5))
    assert found["hit_ratio"] == pytest.approx((0.25, 0.1, 0.4))
