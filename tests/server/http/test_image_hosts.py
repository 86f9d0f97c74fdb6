"""Images are fetched from listed hosts alone, at addresses that may be used, and within limits."""

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from runtime.config import make_config
from runtime.errors import InvalidRequest
from server.http import image_hosts
from server.http.image_hosts import ImageHosts

Answers = Mapping[str, tuple[int, dict[str, str], bytes]]
PNG = b"\x89PNG and so on"


@contextmanager
def serving(answers: Answers) -> Iterator[str]:
    """A server on 127.0.0.1; `answers` by path: status, headers and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/slow":
                gone.wait(30)
            status, headers, body = answers.get(self.path, (404, {}, b""))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *given: object) -> None:
            pass

    gone, server = threading.Event(), ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        gone.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def web():
    answers: dict[str, tuple[int, dict[str, str], bytes]] = {"/a.png": (200, {}, PNG), "/large": (200, {}, b"x" * 5000)}
    with serving(answers) as url:
        port = url.rpartition(":")[2]
        answers |= {
            "/near": (302, {"Location": "/a.png"}, b""),
            "/far": (302, {"Location": f"http://localhost:{port}/a.png"}, b""),
            "/file": (302, {"Location": "file:///etc/passwd"}, b""),
            "/loop": (307, {"Location": "/loop"}, b""),
        }
        yield url


def fetch(listed: str | None, *urls: str) -> dict[str, bytes]:
    return asyncio.run(ImageHosts(listed).fetch("", urls, "messages"))


def test_a_listed_address_serves_images(web):
    for listed in ("127.0.0.1", "127.0.0.0/8", "a.example, 127.0.0.1", web.removeprefix("http://")):
        assert fetch(listed, f"{web}/a.png", f"{web}/near", "data:,", f"{web}/a.png") == {
            f"{web}/a.png": PNG,
            f"{web}/near": PNG,
        }


def test_a_name_of_a_private_address_needs_its_address(web):
    port = web.rpartition(":")[2]
    url = f"http://localhost:{port}/a.png"
    assert fetch(f"localhost:{port},127.0.0.1", url) == {url: PNG}
    with pytest.raises(InvalidRequest, match="private address"):
        fetch(f"localhost:{port}", url)
    with pytest.raises(InvalidRequest, match="the operator lists"):
        fetch("localhost,127.0.0.1", url)  # another port


def test_nothing_is_fetched_by_default(web):
    assert fetch(None, f"{web}/a.png") == {}


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/far", "redirects to another"),
        ("/file", "redirects to another"),
        ("/loop", "too often"),
        ("/none", "status 404"),
        ("/large", "more than"),
        ("/slow", "longer than"),
    ],
)
def test_what_is_refused(web, path, why, monkeypatch):
    monkeypatch.setattr(image_hosts, "MOST_BYTES", 4000)
    monkeypatch.setattr(image_hosts, "FETCH_S", 0.3 if path == "/slow" else 10)
    with pytest.raises(InvalidRequest, match=why) as refused:
        fetch("127.0.0.1", web + path)
    assert (refused.value.param, refused.value.code) == ("messages", "invalid_image")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.2/a.png",
        "http://127.1/a.png",
        "http://[::1]/a.png",
        "http://127.0.0.1@b.example/a.png",
        "https://a.example.b.example/a.png",
        "http://a.example:22/a.png",
        "http:///a.png",
    ],
)
def test_other_hosts_are_refused(url, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *given: pytest.fail("it connects"))
    with pytest.raises(InvalidRequest, match="the operator lists"):
        fetch("a.example,127.0.0.1", url)


@pytest.mark.parametrize("address", ["10.0.0.1", "169.254.169.254", "::ffff:10.0.0.1", "224.0.0.1", "fe80::1", "::"])
def test_names_of_private_addresses_are_refused(address, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: [(0, 0, 0, "", (address, 80))])
    monkeypatch.setattr(socket, "create_connection", lambda *given: pytest.fail("it connects"))
    with pytest.raises(InvalidRequest, match="private address"):
        fetch("a.example", "http://a.example/a.png")


def test_what_fails_is_told_without_details():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}/", "http://127.0.0.1:x/"):
        with pytest.raises(InvalidRequest, match=r"fetching an image fails \("):
            fetch("127.0.0.1", url)


@pytest.mark.parametrize("listed", ["a.example, b.example:8080", "10.0.0.0/8,::1", "fd00::/8"])
def test_hosts_are_listed(listed):
    assert make_config(image_hosts=listed).server.image_hosts == listed


@pytest.mark.parametrize("listed", ["", "https://a.example", "a.example/b", "a b"])
def test_what_is_no_host(listed):
    with pytest.raises(ValueError, match=r"image.hosts"):
        make_config(image_hosts=listed)
