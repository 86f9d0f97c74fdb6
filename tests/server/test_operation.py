"""A server as its operators run it: keys with limits, deadlines, pausing, draining, slow clients, logs."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import httpx
import pytest

from runtime.config import make_config
from runtime.errors import RametError
from runtime.logs import set_up_logs
from server.auth.keys import Tenant
from server.http.access import AccessLog
from server.serve import _check_replays, _warn
from tests.server.conftest import PATIENCE_S, start, stop
from tests.server.http.test_connections import logged
from tests.server.test_faults import join

KEYS = {"alice": "alice-secret-key", "bob": "bob-secret-key", "root": "root-secret-key"}
SECRET = "xylophone quartz"
# At temperature 1 a random model's tokens are anybody's guess: no draft makes it quicker than one step a token.
ENDLESS = {
    "text": f"Say {SECRET}:",
    "sampling_params": {"max_new_tokens": 450, "ignore_eos": True, "temperature": 1},
}


@pytest.fixture(scope="module")
def operated(tiny_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("operated")
    lines = [f"{name} {key}{' admin' if name == 'root' else ''}" for name, key in KEYS.items()]
    (directory / "keys").write_text("\n".join(lines))
    server = start(
        directory / "log",
        "--model",
        str(tiny_dir),
        "--pool-tokens",
        "16384",
        "--api-keys",
        str(directory / "keys"),
        "--max-waiting",
        "6",
        "--key-share",
        "0.05",
        "--max-output-tokens",
        "460",  # three of 70 for each key
        "--client-timeout",
        "1.5",
        "--cors-origins",
        "https://a.example",
        "--trusted-proxies",
        "127.0.0.1",
        "--log-format",
        "json",
        "--log-level",
        "debug",
        "--debug-invariants",
    )
    yield server
    assert stop(server) == 0
    text = (directory / "log").read_text()
    assert SECRET not in text
    assert not any(key in text for key in KEYS.values())
    assert "Traceback" not in text
    for line in text.splitlines():
        assert {"time", "level", "logger", "message"} <= json.loads(line).keys()


@pytest.fixture
def ask(operated):
    def ask(who: str, method: str = "POST", path: str = "/generate", headers=(), **body) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEYS[who]}", **dict(headers)}
        return httpx.request(method, operated.url + path, json=body or None, headers=headers, timeout=300)

    def idle() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            state = ask("root", "GET", "/server_info").json()["state"]
            if state["running"] == state["waiting"] == state["pages_private"] == state["pages_locked"] == 0:
                return
            assert time.monotonic() < deadline, state
            time.sleep(0.05)

    yield ask
    idle()


def raw(server, who: str, body: bytes, length: int | None = None) -> socket.socket:
    """A connection on which a request was sent, its answer unread."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect((host, int(port)))
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[who]}\r\n"
    connection.sendall(f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body)
    return connection


def test_a_deadline_frees_everything(ask):
    answer = ask("alice", **ENDLESS, timeout_s=0.01)
    assert (answer.status_code, answer.json()["error"]["type"]) == (408, "timeout_error")
    assert answer.headers["x-should-retry"] == "false"
    asked = {"input": "x", "timeout_s": 0.01, "max_output_tokens": 4000}
    assert ask("alice", path="/v1/responses", **asked).status_code == 408


def test_a_deadline_ends_a_stream(ask, operated):
    """The engine is paused behind the first part. Who was too quick for that, or had no part, has another try."""
    headers = {"authorization": f"Bearer {KEYS['alice']}", "x-request-id": "stream-late"}
    for seconds in (2, 20, 120):
        body = {**ENDLESS, "timeout_s": seconds, "stream": True}
        with httpx.stream("POST", operated.url + "/generate", json=body, headers=headers, timeout=300) as told:
            lines = (line for line in told.iter_lines() if line)
            parts = [next(lines)]
            ask("root", "POST", "/pause")
            try:
                parts += lines
            finally:
                ask("root", "POST", "/resume")
        *parts, error, done = parts
        assert (told.status_code, done) == (200, "data: [DONE]")
        if parts and "error" in (end := json.loads(error[6:])):
            break
    assert end["error"]["type"] == "timeout_error"
    assert json.loads(logged(operated, "stream-late"))["status"] == 408, "though 200 had been sent"


def test_pause_and_resume(ask):
    assert ask("alice", "POST", "/pause").status_code == 403
    assert ask("root", "GET", "/ready").status_code == 200
    assert ask("root", "POST", "/pause").json() == {"paused": True}
    assert ask("root", "GET", "/ready").status_code == 503
    assert ask("alice", "GET", "/health").status_code == 200
    assert ask("alice", **ENDLESS, timeout_s=0.2).status_code == 408
    found = []
    short = {"text": "x", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    thread = threading.Thread(target=lambda: found.append(ask("bob", **short)))
    thread.start()
    while ask("root", "GET", "/server_info").json()["state"]["waiting"] == 0:
        time.sleep(0.02)
    assert not found
    assert ask("root", "POST", "/resume").json() == {"paused": False}
    join([thread])
    assert found[0].json()["meta_info"]["completion_tokens"] == 3


def test_what_one_key_may_have_under_way(ask, operated):
    """The engine is paused, so that no machine is too quick: all three are under way until it goes on."""
    ask("root", "POST", "/pause")
    open_ones = [raw(operated, "alice", json.dumps({**ENDLESS, "stream": True}).encode()) for _ in range(3)]
    while ask("root", "GET", "/server_info").json()["state"]["waiting"] < 3:
        time.sleep(0.02)
    answer = ask("alice", text="x", sampling_params={"max_new_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert answer.headers["retry-after"] == "1"
    assert "x-should-retry" not in answer.headers, "OpenAI's clients would not try again"
    assert ask("alice", "GET", "/health_generate").status_code == 429, "a probe is a request, too"
    ask("root", "POST", "/resume")
    assert all(b"200 OK" in connection.recv(200) for connection in open_ones)
    assert ask("bob", text="x", sampling_params={"max_new_tokens": 1}).status_code == 200
    assert ask("bob", "GET", "/health_generate").status_code == 200
    for connection in open_ones:
        connection.close()


def test_lengths_are_bounded(ask):
    assert ask("alice", input_ids=[1] * 600).json()["error"]["code"] == "context_length_exceeded"
    for most in (None, 461):
        free = ask("alice", input_ids=[1], sampling_params={"max_new_tokens": most, "ignore_eos": True}).json()
        assert free["meta_info"]["completion_tokens"] == 460
        assert free["meta_info"]["finish_reason"]["type"] == "length"


def test_text_that_cannot_fit_is_refused_unread(ask):
    """To tokenize it takes seconds, and the answer is known before."""
    for path, name in (("/generate", "text"), ("/tokenize", "prompt")):
        error = ask("alice", "POST", path, **{name: "word " * 100_000}).json()["error"]
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")
        assert "characters" in error["message"]


def test_a_client_that_does_not_read_is_cut(ask, operated):
    """Its answer is far more than buffers hold, and the server does not keep it for ever."""
    body = {**ENDLESS, "stream": True, "return_logprob": True, "top_logprobs_num": 100}
    served = operated.log.read_text().count('"path": "/generate"')
    connection = raw(operated, "alice", json.dumps(body).encode())
    deadline = time.monotonic() + 60
    while operated.log.read_text().count('"path": "/generate"') == served:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    received = b""
    try:
        while chunk := connection.recv(1 << 20):
            received += chunk
    except ConnectionResetError:
        pass
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received


def test_a_stream_that_its_client_cuts_off_is_no_success_in_the_log(ask, operated):
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 3}}
    assert ask("alice", **body, headers={"x-request-id": "stream-read"}).text.endswith("[DONE]\n\n")
    assert json.loads(logged(operated, "stream-read"))["status"] == 200
    ask("root", path="/pause")  # no machine is too quick for what follows
    headers = {"authorization": f"Bearer {KEYS['alice']}", "x-request-id": "stream-left"}
    with httpx.stream("POST", f"{operated.url}/generate", json=body, headers=headers) as answer:
        assert next(answer.iter_lines()) == ": keep-alive"
    ask("root", path="/resume")
    assert json.loads(logged(operated, "stream-left"))["status"] == 499


def test_a_client_that_does_not_send_is_cut(ask, operated):
    host, port = operated.url.removeprefix("http://").split(":")
    parts = (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea")
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(socket.create_connection((host, int(port)), timeout=30)) for _ in parts]
        for connection, sent in zip(silent, parts, strict=True):
            connection.sendall(sent)
        half = opened.enter_context(raw(operated, "alice", b'{"text": ', length=100))
        for connection, sent in zip(silent, parts, strict=True):
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while chunk := connection.recv(4096):
                    received += chunk
            assert received.count(b"200 OK") == sent.count(b"\r\n\r\n")
        assert half.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_client_that_goes_on_sending_after_its_answer_is_cut(operated):
    """It holds its connection without a key, and as long as it likes, if nobody looks."""
    host, port = operated.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as opened:
        sending = []
        for head in ("GET /health", "GET /nope", "POST /generate"):
            sending.append(opened.enter_context(socket.create_connection((host, int(port)), timeout=30)))
            sending[-1].sendall(f"{head} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        deadline = time.monotonic() + 60
        while sending:
            assert time.monotonic() < deadline
            for connection in list(sending):
                try:
                    connection.sendall(b"1\r\nx\r\n")
                except ConnectionError:
                    sending.remove(connection)
            time.sleep(0.1)


def test_an_upgrade_is_a_request_like_any_other(ask, operated):
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    upgrade["sec-websocket-key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    assert httpx.get(f"{operated.url}/v1/models", headers=upgrade).status_code == 401
    assert ask("alice", "GET", "/v1/models", headers=upgrade).status_code == 200


def test_what_is_too_deep(ask):
    deep: dict = {}
    for _ in range(70):
        deep = {"a": deep}
    answer = ask("alice", text="x", deep=deep)
    assert "levels" in answer.json()["error"]["message"]
    wide = ask("alice", text="[" * 500, input_ids=None, sampling_params={"max_new_tokens": 1, "stop": ["{" * 90]})
    assert wide.status_code == 200


def test_request_ids_origins_and_proxies(ask, operated):
    given = ask("alice", "GET", "/v1/models", headers={"x-request-id": "my-own-1", "x-forwarded-for": "192.0.2.7"})
    assert given.headers["x-request-id"] == "my-own-1"
    forged = ask("alice", "GET", "/v1/models", headers={"x-request-id": 'a" level='})
    assert len(forged.headers["x-request-id"]) == 32
    assert ask("alice", "GET", "/nope").headers["x-request-id"]
    line = json.loads(logged(operated, "my-own-1"))
    assert (line["status"], line["path"], line["key"], line["client"]) == (200, "/v1/models", "alice", "192.0.2.7")
    for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
        answer = ask("alice", "GET", "/v1/models", headers={"origin": origin})
        assert answer.headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/tokenize", {"sec-fetch-site": "cross-site"}, 403),
        ("/tokenize", {"origin": "https://b.example"}, 403),
        ("/shutdown", {"origin": "https://b.example"}, 403),
        ("/tokenize", {"sec-fetch-site": "cross-site", "origin": "https://a.example"}, 200),
        ("/tokenize", {"host": "ramet.example", "origin": "https://ramet.example", "x-forwarded-proto": "https"}, 200),
    ],
)
def test_pages_of_other_sites_make_nobody_ask(ask, path, headers, status):
    """Even with a key, which an extension or a client of theirs may have; `test_pages` has the whole table."""
    answer = ask("root", "POST", path, headers=headers, prompt="x")
    assert answer.status_code == status
    assert status == 200 or "origin" in answer.json()["error"]["message"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_client_writes_a_log_line_of_its_own(form, capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    set_up_logs("info", form)
    logging.getLogger("ramet").warning("request %s failed", "x\n2026-01-01 INFO forged\u2028\ud800\x1b[31m")
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "\x1b" not in line
    assert "forged" in line


def test_an_unexpected_failure_is_logged_once(caplog, logged_here):
    sent, counted = [], []

    async def app(scope, receive, send):
        raise ValueError("a secret of this machine")

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/x\n" + "y" * 5000, "headers": []}
    with caplog.at_level("INFO"):
        asyncio.run(AccessLog(app, lambda *request: counted.append(request))(scope, None, send))
    assert counted == [("GET", "none", 500)]
    assert sent[0]["status"] == 500
    assert b"secret" not in sent[1]["body"]
    assert [record.levelname for record in logged_here()] == ["ERROR", "INFO"]
    assert not any("\n" in record.getMessage() or len(record.getMessage()) > 400 for record in logged_here())


def test_the_engine_is_ended_by_its_server_alone(ask, operated):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        os.kill(operated.engine_pid(), number)
    answer = ask("alice", text="x", sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    assert answer.json()["meta_info"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("host", "has_keys", "events", "warnings"),
    [
        ("127.0.0.1", False, None, 0),
        ("0.0.0.0", False, None, 1),
        ("0.0.0.0", True, None, 0),
        ("127.0.0.1", True, "public", 1),
        ("127.0.0.1", True, "all", 0),
        ("0.0.0.0", False, "public", 1),
    ],
)
def test_an_operator_is_told_who_may_ask_and_whom_events_leave_out(logged_here, host, has_keys, events, warnings):
    options = {} if events is None else {"kv_events": "tcp://127.0.0.1:1", "kv_events_of": events}
    _warn(make_config(host=host, **options), [Tenant("a", b"")] if has_keys else [])
    assert len(logged_here()) == warnings


@pytest.mark.parametrize(
    ("endpoint", "allowed"),
    [
        ("tcp://127.0.0.1:5558", True),
        ("tcp://[::1]:5558", True),
        ("ipc:///run/ramet/replay", True),
        ("tcp://*:5558", False),
        ("tcp://10.0.0.1:5558", False),
    ],
)
def test_replays_of_the_events_of_keys_are_for_this_machine(endpoint, allowed):
    config = make_config(kv_events=f"ipc:///events,{endpoint}")
    _check_replays(config, [])
    with contextlib.nullcontext() if allowed else pytest.raises(RametError, match="for this machine alone"):
        _check_replays(config, [Tenant("a", b"")])


class Collector(BaseHTTPRequestHandler):
    """Of OpenTelemetry's traces: the paths and bodies that it is sent."""

    def do_POST(self):
        self.server.received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_https_and_traces_that_go_to_a_collector(tiny_dir, tmp_path, monkeypatch):
    has_traces = find_spec("opentelemetry.instrumentation.asgi") is not None
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files, *names],
        check=True,
        capture_output=True,
    )
    trusted = ssl.create_default_context(cafile=str(tmp_path / "cert"))
    options = ["--ssl-certfile", f"{tmp_path / 'cert'},{tmp_path / 'key'}"]
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    collector.received = []
    threading.Thread(target=collector.serve_forever, args=(0.02,), daemon=True).start()
    if has_traces:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    server = start(tmp_path / "log", "--model", str(tiny_dir), "--pool-tokens", "1024", *options, verify=trusted)
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"x-request-id": "traced-1", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    body = {"text": SECRET, "stream": True, "sampling_params": {"max_new_tokens": 2}}
    try:
        assert server.url.startswith("https://")
        answer = httpx.post(f"{server.url}/generate", json=body, headers=headers, verify=trusted, timeout=300)
        assert answer.status_code == 200
    finally:
        assert stop(server) == 0
        collector.shutdown()
    sent = b"".join(data for path, data in collector.received if path == "/v1/traces")
    assert SECRET.encode() not in sent
    for told in (bytes.fromhex(trace), b"traced-1"):
        assert (told in sent) == has_traces
