"""Connections in bytes: whoever is refused gets the answer, and nothing on a connection is taken for what it is not."""

import http.client
import json
import re
import select
import socket
import time

import httpx
import pytest

from tests.server.conftest import PATIENCE_S

LARGE = 2_000_000  # more than a socket holds: the client still sends when it is answered


@pytest.fixture
def connect(guarded):
    host, port = guarded.url.removeprefix("http://").split(":")
    opened = []

    def connect() -> socket.socket:
        opened.append(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def wait_for_answer(connection: socket.socket) -> None:
    """Until its first bytes are there to be read."""
    assert select.select([connection], [], [], PATIENCE_S)[0]


def read_to_end(connection: socket.socket) -> tuple[int, dict, dict]:
    """Status, headers and JSON of the last answer on a connection; a reset is an error."""
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), json.loads(body)


LENGTH = f"Content-Length: {LARGE}"
KEY = "X-Api-Key: alice-secret-key"


@pytest.mark.parametrize(
    ("start", "status"),
    [
        (["POST /generate HTTP/1.1", "Host: x", "no header", "", ""], 400),
        (["POST /generate HTTP/1.1", "Host: x", KEY, "Transfer-Encoding: chunked", "", "no chunk", ""], 400),
        (["POST /generate HTTP/1.1", "Host: x", LENGTH, "Connection: close", "", ""], 401),
        (["POST /generate HTTP/1.0", LENGTH, "", ""], 401),
        (["POST /pause HTTP/1.1", "Host: x", KEY, LENGTH, "Connection: close", "", ""], 403),
    ],
    ids=["no header", "no chunk", "no key", "HTTP/1.0", "no admin"],
)
def test_whoever_still_sends_gets_the_answer(connect, start, status):
    """A server that closes with bytes unread resets the connection: sending fails, and the answer may be lost."""
    connection = connect()
    connection.sendall("\r\n".join(start).encode())
    wait_for_answer(connection)
    for _ in range(LARGE // 50_000):
        connection.sendall(b"x" * 50_000)
    connection.shutdown(socket.SHUT_WR)
    found, headers, body = read_to_end(connection)
    assert found == status
    assert headers["connection"] == "close"
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert re.fullmatch(r"[0-9a-f]{32}", headers["x-request-id"])


def test_a_body_that_was_announced_and_not_sent_is_not_the_next_request(connect):
    """A client that is refused instead of `100 Continue` may send its body or not, so the connection is closed."""
    connection = connect()
    another = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(another)}\r\nExpect: 100-continue\r\n\r\n"
    connection.sendall(head.encode())
    wait_for_answer(connection)
    connection.sendall(another)
    status, headers, _ = read_to_end(connection)
    assert (status, headers["connection"]) == (401, "close")


def test_a_refusal_without_a_body_keeps_the_connection(guarded):
    connection = http.client.HTTPConnection(guarded.url.removeprefix("http://"), timeout=PATIENCE_S)
    used = set()
    for _ in range(3):
        connection.request("GET", "/v1/models")
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("connection")) == (401, None)
        used.add(connection.sock.getsockname())
        answer.read()
    assert len(used) == 1
    connection.close()


def logged(server, text: str) -> str:
    """The one line with a text, which is written after the answer."""
    for _ in range(2400):
        if found := [line for line in server.log.read_text().splitlines() if text in line]:
            break
        time.sleep(0.05)
    (line,) = found
    return line


def test_what_is_no_http_has_an_id_in_the_log(connect, guarded):
    connection = connect()
    connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
    connection.shutdown(socket.SHUT_WR)
    _, headers, _ = read_to_end(connection)
    line = logged(guarded, headers["x-request-id"])
    assert "Invalid HTTP request" in line


BODY = b'{"prompt": "x"}'


@pytest.mark.parametrize(
    "headers",
    [
        [KEY, f"Content-Length: {len(BODY)}", f"content-length: {len(BODY)}"],
        [KEY, f"Content-Length: {len(BODY)}, {len(BODY)}"],
        [KEY, f"Content-Length: {len(BODY)},", f" {len(BODY)}"],
        [KEY, KEY, f"Content-Length: {len(BODY)}"],
        [KEY, "X-API-Key: boss-secret-key", f"Content-Length: {len(BODY)}"],
        [*["Authorization: Bearer alice-secret-key"] * 2, f"Content-Length: {len(BODY)}"],
        ["Authorization: Bearer x", "Authorization: Bearer boss-secret-key", f"Content-Length: {len(BODY)}"],
    ],
)
def test_headers_that_may_stand_once_are_refused_twice(connect, headers):
    """Of two, a proxy before this server may have believed the other one."""
    connection = connect()
    head = "\r\n".join(["POST /tokenize HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""])
    connection.sendall(head.encode() + BODY)
    connection.shutdown(socket.SHUT_WR)
    status, _, body = read_to_end(connection)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("half", [False, True])
def test_the_second_request_on_a_connection_is_looked_at_as_well(connect, half):
    connection = connect()
    first = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    second = b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nContent-Length: 0\r\n\r\n"
    connection.sendall(first + second[:70] if half else first + second)
    if half:
        wait_for_answer(connection)
        connection.sendall(second[70:])
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"400"]


@pytest.mark.parametrize(
    ("target", "key", "status"),
    [
        ("http://elsewhere:80/v1/models?x=1", "alice", 200),
        ("HTTPS://x/v1/models", "alice", 200),
        ("http://x/v1/models", "", 401),
        ("http://x/server_info", "alice", 403),
        ("http://x/server_info", "boss", 200),
        ("http://x", "", 200),
        ("http://x?y=/v1/models", "", 200),
        ("http:/v1/models", "alice", 404),
    ],
)
def test_a_target_in_absolute_form_is_its_path(connect, target, key, status):
    """As clients send it that take the server for a proxy (RFC 9112, section 3.2.2)."""
    connection = connect()
    authorization = f"X-API-Key: {key}-secret-key\r\n" if key else ""
    connection.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{authorization}\r\n".encode())
    assert int(connection.makefile("rb").readline().split()[1]) == status


def test_nobody_says_where_a_request_comes_from(guarded):
    """Without `--trusted-proxies`; with it, see test_operation."""
    headers = {"X-Forwarded-For": "192.0.2.7", "X-Forwarded-Proto": "https", "X-Request-Id": "forwarded-1"}
    httpx.get(f"{guarded.url}/health", headers=headers)
    line = logged(guarded, "forwarded-1")
    assert "127.0.0.1" in line
    assert "192.0.2.7" not in line


@pytest.mark.parametrize(("version", "chunked"), [("1.0", False), ("1.1", True)])
def test_a_stream_is_framed_as_its_version_has_it(connect, version, chunked):
    sampling = {"max_new_tokens": 20, "ignore_eos": True}
    body = json.dumps({"text": "hello", "stream": True, "sampling_params": sampling})
    head = [f"POST /generate HTTP/{version}", "Host: x", KEY, f"Content-Length: {len(body)}", "Connection: close"]
    connection = connect()
    connection.sendall("\r\n".join([*head, "", body]).encode())
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    *events, done, end = answer.read().decode().split("\n\n")
    assert (answer.chunked, done, end) == (chunked, "data: [DONE]", "")
    assert len(json.loads(events[-1].removeprefix("data: "))["output_ids"]) == 20
