"""Limits on bodies, on ASGI messages without a server."""

import asyncio
import json
from typing import Annotated

import pytest
from fastapi import Body, FastAPI, Request

from server.auth.keys import EveryKey
from server.http import admission, limits

LIMIT = 1000
CHUNKED = [(b"transfer-encoding", b"chunked")]


@pytest.fixture(autouse=True)
def limit(monkeypatch):
    for module in (limits, admission):
        monkeypatch.setattr(module, "MOST_BYTES", LIMIT)


def wrap(app):
    return admission.AdmissionMiddleware(app, (), limits.BodyLimit(5.0), bool)


def exchange(chunks, headers=()):
    """The messages that come out, the scope and body that the application saw, and how many chunks were read."""
    sent, seen, left = [], [], list(chunks)

    async def receive():
        if not left:
            return {"type": "http.disconnect"}
        body = left.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        seen.append((dict(scope["headers"]), (await receive())["body"]))

    scope = {"type": "http", "method": "POST", "path": "/x", "headers": list(headers)}
    asyncio.run(wrap(app)(scope, receive, send))
    return sent, seen, len(chunks) - len(left)


def test_the_answer_to_a_large_body_comes_before_the_rest_is_thrown_away():
    for headers in (CHUNKED, [(b"content-length", b"3000")]):
        sent, seen, read = exchange([b"x" * 600] * 5, headers)
        assert [message.get("status") for message in sent] == [413, None, None]
        assert b'"error"' in sent[1]["body"]
        assert (b"connection", b"close") in sent[0]["headers"]
        assert not seen
        assert read == 5
    assert exchange([b"x" * LIMIT] * 1000, CHUNKED)[2] < 20, "an endless body is not read to its end"


def test_a_body_with_two_lengths_is_refused():
    headers = [(b"content-length", b"2"), (b"transfer-encoding", b"chunked")]
    sent, seen, _ = exchange([b"{}"], headers)
    assert [message.get("status") for message in sent] == [400, None, None]
    assert (b"connection", b"close") in sent[0]["headers"]
    assert not seen


def status(chunks, *headers):
    """The status of a refusal; None if the application had the body."""
    sent, seen, _ = exchange(chunks, headers)
    assert bool(sent) != bool(seen)
    return sent[0]["status"] if sent else None


def test_a_body_in_chunks_is_limited_as_one_with_a_length():
    """By what has arrived, not by what was announced: the sizes of all chunks count together."""
    for headers in ((), CHUNKED):
        assert status([b"1" * LIMIT], *headers) is None
        assert status([b"1" * LIMIT, b""], *headers) is None
        assert status([b"1" * 999, b"1"], *headers) is None
        assert status([b"1"] * LIMIT, *headers) is None
        assert status([b"1" * (LIMIT + 1)], *headers) == 413
        assert status([b"1" * LIMIT, b"1"], *headers) == 413
        assert status([b"1"] * (LIMIT + 1), *headers) == 413
        assert status([b"", b"1" * 501, b"", b"1" * 500], *headers) == 413
    _, seen, _ = exchange([b"", b'{"a"', b"", b": 1}", b""], CHUNKED)
    assert seen[0][1] == b'{"a": 1}'
    assert status([b"1" * LIMIT, b"1"], (b"content-length", b"5")) == 413, "more than it said"


def test_an_announced_length_is_believed_before_anything_is_read():
    for length, wanted in (
        (b"1000", None),
        (b"0", None),
        (b"1001", 413),
        (b"0001000", None),
        (b"9" * 18, 413),
        (b"9" * 19, 413),
        (b"0" * 14 + b"1000", None),
        (b"0" * 19, 413),
        (b"9" * 5000, 413),
    ):
        assert status([b"{}"], (b"content-length", length)) == wanted, length


def test_media_types():
    for kind in (b"application/json", b"APPLICATION/JSON", b" application/json ; charset=utf-8", b"text/x+json"):
        assert status([b"{}"], (b"content-type", kind)) is None, kind
    for kind in (b"text/plain", b"application/jsonx", b"json", b"", b"text/plain; application/json", b"+jsonx"):
        assert status([b"{}"], (b"content-type", kind)) == 415, kind
        assert status([b""], (b"content-type", kind)) is None, "there is nothing to read"
    _, seen, _ = exchange([b"{}"], [(b"content-type", b"text/x+json"), (b"x", b"y")])
    assert seen[0][0] == {b"content-type": b"text/x+json", b"x": b"y"}
    _, seen, _ = exchange([b"{}"])
    assert seen[0][0][b"content-type"] == b"application/json"


def test_a_compressed_body_is_not_unpacked():
    for encoding, wanted in ((b"gzip", 415), (b"br", 415), (b"identity, gzip", 415), (b" IDENTITY ", None)):
        assert status([b"{}"], (b"content-encoding", encoding)) == wanted
    assert status([b""], (b"content-encoding", b"gzip")) is None, "there is nothing to unpack"


def test_a_body_that_is_too_deep_is_not_parsed():
    assert status([b"[" * 5000]) == 413
    for depth, wanted in ((1, None), (64, None), (65, 400), (400, 400)):
        assert status([b"[" * depth + b"]" * depth]) == wanted


def limited(receive):
    """The messages that come out for a request whose messages come from `receive`, and how often the app ran."""
    sent, ran = [], []

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        ran.append([await receive(), await receive()])

    scope = {"type": "http", "method": "POST", "path": "/x", "headers": CHUNKED}
    asyncio.run(wrap(app)(scope, receive, send))
    return sent, ran


def test_a_client_that_leaves_within_its_body_starts_nothing():
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return messages.pop(0)

    assert limited(receive) == ([], [])
    assert not messages


def test_the_application_has_the_body_once_and_then_what_the_client_does():
    messages = [
        {"type": "http.request", "more_body": True},
        {"type": "http.request", "body": b"{}"},
        {"type": "http.disconnect"},
    ]

    async def receive():
        return messages.pop(0)

    sent, ((body, after),) = limited(receive)
    assert not sent
    assert body == {"type": "http.request", "body": b"{}", "more_body": False}
    assert after == {"type": "http.disconnect"}


def test_what_is_no_request_passes():
    passed = []

    async def app(scope, receive, send):
        passed.append((scope, receive, send))

    asyncio.run(wrap(app)({"type": "lifespan"}, "receive", "send"))
    assert passed == [({"type": "lifespan"}, "receive", "send")]


def test_others_go_on_while_a_long_body_is_read(monkeypatch):
    """Between two passes over it, and not between those over a short one."""
    for module in (limits, admission):
        monkeypatch.setattr(module, "MOST_BYTES", 1 << 20)
    app = FastAPI()
    router = EveryKey()
    turns, seen = [], []

    @router.post("/x")
    async def read(request: Request, body: Annotated[list[str], Body()]):
        seen.append((len(turns), len(body[0])))

    app.include_router(router)

    async def ask(size):
        messages = [{"type": "http.request", "body": json.dumps(["x" * size]).encode(), "more_body": False}]

        async def receive():
            return messages.pop()

        async def send(message):
            pass

        async def others():
            while True:
                turns.append(None)
                await asyncio.sleep(0)

        scope = {"type": "http", "method": "POST", "path": "/x", "headers": [], "query_string": b"", "client": ("", 1)}
        task = asyncio.create_task(others())
        await wrap(app)(scope, receive, send)
        task.cancel()

    for size in (10, 1 << 19):
        turns.clear()
        asyncio.run(ask(size))
    assert [length for _, length in seen] == [10, 1 << 19]
    assert seen[1][0] >= seen[0][0] + 2
