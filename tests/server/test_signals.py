"""Signals to a server: what runs ends, what comes is refused, and a second signal ends all at once."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from runtime.errors import Overloaded
from server import signals
from server.http.shutdown import ShutdownFlag
from tests.server.conftest import PATIENCE_S, start
from tests.server.test_faults import LONG, join, read_stream, streams


@pytest.mark.parametrize(
    ("later_s", "number", "is_forced"),
    [
        (0.4, signal.SIGTERM, False),
        (0.6, signal.SIGTERM, True),
        (0.6, signal.SIGINT, True),
        (9.0, signal.SIGHUP, False),
        (0.1, signal.SIGQUIT, True),
    ],
)
def test_which_signal_is_the_second_one(monkeypatch, later_s, number, is_forced):
    """`timeout` sends one signal twice, a shell and systemd a HUP behind it; the second one is an operator's."""
    now = 100.0
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now))

    async def take() -> bool:
        nonlocal now
        shutdown = ShutdownFlag()
        taking = signals.Signals(shutdown)
        for each, after_s in ((signal.SIGTERM, 0.0), (number, later_s)):
            now += after_s
            taking._take(each)
        with pytest.raises(Overloaded):
            shutdown.check()
        return taking.forced.is_set()

    assert asyncio.run(take()) == is_forced


def test_a_signal_lets_what_runs_end_and_takes_nothing_new(tiny_dir, tmp_path):
    """Sent to the process group, as a terminal sends it: to the engine as well. Those who look are not waited for."""
    options = ["--model", str(tiny_dir), "--pool-tokens", "8192", "--drain-time", "300"]
    server = start(tmp_path / "log", *options, own_group=True)
    with httpx.stream("GET", f"{server.url}/dashboard/events", timeout=300) as watched:
        looking = watched.iter_lines()  # dropped, it would end the stream
        next(looking)
        threads, found = streams(server, 4)
        os.killpg(server.process.pid, signal.SIGINT)
        deadline = time.monotonic() + PATIENCE_S
        while "shutting down" not in (answer := httpx.get(f"{server.url}/ready")).text:
            assert answer.status_code == 503, "the engine is paused"
            assert time.monotonic() < deadline
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert answer.headers["retry-after"]
        refused = httpx.post(f"{server.url}/generate", json=LONG)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
        httpx.post(f"{server.url}/resume")
        assert server.process.wait(PATIENCE_S) == 0, "and not for those who look"
    join(threads)
    assert len(found) == 4
    for lines in found:
        *parts, last = [json.loads(line[6:]) for line in lines[:-1]]
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 400}
        assert len(last["output_ids"]) == 400
        assert last["text"] == "".join(part["delta"] for part in [*parts, last])
    assert "Traceback" not in server.log.read_text()


def test_a_signal_after_a_shutdown_is_the_first_one_and_what_runs_for_too_long_is_aborted(tiny_dir, tmp_path):
    """An orchestrator may ask for the one and send the other."""
    server = start(tmp_path / "log", "--model", str(tiny_dir), "--pool-tokens", "8192", "--drain-time", "1")
    httpx.post(f"{server.url}/pause")
    found = []
    body = {**LONG, "stream": False}
    thread = threading.Thread(target=lambda: found.append(httpx.post(f"{server.url}/generate", json=body)))
    thread.start()
    server.wait(lambda state: state["waiting"] == 1)
    assert httpx.post(f"{server.url}/shutdown").status_code == 202
    server.process.send_signal(signal.SIGHUP)
    assert server.process.wait(PATIENCE_S) == 0
    join([thread])
    assert found[0].json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_second_signal_ends_at_once(tiny_dir, tmp_path):
    """`timeout` sends one signal twice, a shell and systemd a HUP behind it; the second one is an operator's."""
    server = start(tmp_path / "log", "--model", str(tiny_dir), "--pool-tokens", "8192", own_group=True)
    httpx.post(f"{server.url}/pause")
    found: list[list[str]] = []
    thread = threading.Thread(target=read_stream, args=(server.url, found))
    thread.start()
    server.wait(lambda state: state["waiting"] == 1)
    server.process.send_signal(signal.SIGTERM)
    os.killpg(server.process.pid, signal.SIGTERM)
    while httpx.get(f"{server.url}/ready").status_code == 200 or "stopping" not in server.log.read_text():
        time.sleep(0.02)
    while server.process.poll() is None:  # within half a second they count as one
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    assert server.process.wait(PATIENCE_S) == 1
    join([thread])
    assert json.loads(found[0][-2][6:])["error"]["type"] == "engine_dead", "what ran is lost, and its client knows"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGQUIT, 1)])
def test_a_signal_while_the_model_is_loaded(tiny_dir, tmp_path, number, code):
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", "--model", str(tiny_dir)]
    (tmp_path / "tmp").mkdir()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")}, process_group=0
        )
    deadline = time.monotonic() + PATIENCE_S
    while not list((tmp_path / "tmp").glob("ramet-*/inbox")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, number)
    assert process.wait(PATIENCE_S) == code
    assert list((tmp_path / "tmp").iterdir()) == []
    assert "Traceback" not in (tmp_path / "log").read_text()
