"""Servers that are killed, restarted, stopped, or cannot start."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from tests.processes import wait_for_end
from tests.server.conftest import PATIENCE_S, start

LONG = {"text": "Count:", "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}


def read_stream(url: str, found: list, **body) -> None:
    with httpx.stream("POST", f"{url}/generate", json=LONG | body, timeout=300) as answer:
        found.append([line for line in answer.iter_lines() if line.startswith("data: ")])


def streams(server, count: int) -> tuple[list[threading.Thread], list]:
    """Streams that all are under way; the engine is paused, so that no machine is too quick for what follows."""
    while True:
        found: list = []
        httpx.post(f"{server.url}/pause")
        threads = [threading.Thread(target=read_stream, args=(server.url, found)) for _ in range(count)]
        for thread in threads:
            thread.start()
        state = server.wait(lambda s: s["waiting"] == count)
        while state["waiting"]:
            httpx.post(f"{server.url}/resume")
            httpx.post(f"{server.url}/pause")
            state = server.state()
        if state["running"] == count:
            return threads, found
        httpx.post(f"{server.url}/resume")  # some have ended meanwhile
        join(threads)


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_dead_engine_ends_every_stream_and_the_server(tiny_dir, tmp_path):
    server = start(tmp_path / "log", "--model", str(tiny_dir), "--pool-tokens", "8192")
    threads, found = streams(server, 8)
    os.kill(server.engine_pid(), signal.SIGKILL)
    join(threads)
    assert len(found) == 8
    for lines in found:
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2][6:])["error"]["type"] == "engine_dead"
    assert server.process.wait(PATIENCE_S) == 70


def test_a_server_whose_engine_does_not_answer_says_so_and_exits_with_70(tiny_dir, tmp_path):
    before = "import runtime.frontend.async_engine as engine; engine._STOP_SECONDS = 1"
    options = ["--model", str(tiny_dir), "--pool-tokens", "8192", "--drain-time", "0"]
    server = start(tmp_path / "log", *options, before=before)
    threads, found = streams(server, 2)
    os.kill(server.engine_pid(), signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    join(threads)
    for lines in found:
        error = json.loads(lines[-2][6:])["error"]
        assert (error["type"], error["message"]) == ("engine_dead", "the engine does not answer; this request is lost")
    assert server.process.wait(PATIENCE_S) == 70
    log = (tmp_path / "log").read_text()
    assert "the engine does not answer: 2 requests are lost" in log
    assert "the engine does not end and is killed" in log


def test_too_many_requests_are_told_when_to_come_back_and_nothing_outlives_a_killed_server(
    tiny_dir, tmp_path, monkeypatch
):
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    options = ["--model", str(tiny_dir), "--pool-tokens", "4096", "--max-running", "2", "--max-waiting", "1"]
    server = start(tmp_path / "log", *options)
    httpx.post(f"{server.url}/pause")  # no machine is too quick for what follows
    body = {"text": "x", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True, "n": 3}}
    thread = threading.Thread(target=read_stream, args=(server.url, []), kwargs=body)
    thread.start()
    server.wait(lambda state: state["waiting"] == 3)
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert int(answer.headers["retry-after"]) >= 1
    body["sampling_params"]["n"] = 4
    assert httpx.post(f"{server.url}/generate", json=body, timeout=60).status_code == 400
    httpx.post(f"{server.url}/resume")
    join([thread])
    server.check_idle()
    engine = server.engine_pid()
    server.process.kill()
    server.process.wait(PATIENCE_S)
    assert not list((tmp_path / "t").glob("*ramet*")), "sockets"
    wait_for_end(engine)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--model", "/no/such/model"], 1, "no such directory"),
        (["--no-such-option"], 2, "unrecognized"),
        (["--pool-tokens", "1000000000000"], 1, "--pool-tokens"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(options, code, words, tiny_dir):
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", "--log-level", "error"]
    if "--model" not in options:
        command += ["--model", str(tiny_dir)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == code
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_known_before_the_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "server.cli", "serve", "--model", "/no/such/model", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert "cannot listen" in done.stderr
