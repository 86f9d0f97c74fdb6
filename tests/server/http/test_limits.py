"""Limits on bodies, on ASGI messages without a server."""

from __future__ import annotations

import asyncio

from server.http.door import Door
from server.http.limits import BodyLimit

LIMIT = 1000
CHUNKED = [(b"transfer-encoding", b"chunked")]


def exchange(chunks, headers=()):
    """The messages that come out, the scope and body that the application saw, and how many chunks were read."""
    sent, seen, left = [], [], list(chunks)

    async def receive():
        body = left.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        seen.append((dict(scope["headers"]), (await receive())["body"]))

    scope = {"type": "http", "method": "POST", "headers": list(headers)}
    asyncio.run(Door(app, (), BodyLimit(LIMIT, 5))(scope, receive, send))
    return sent, seen, len(chunks) - len(left)


def test_a_body_within_the_limit_is_joined():
    sent, seen, _ = exchange([b"x" * 500, b"y" * 500], [(b"content-type", b"application/problem+json; charset=utf-8")])
    assert seen[0][1] == b"x" * 500 + b"y" * 500
    assert not sent


def test_a_missing_content_type_is_json():
    _, seen, _ = exchange([b"{}"])
    assert seen[0][0][b"content-type"] == b"application/json"


def test_the_answer_to_a_large_body_comes_before_the_rest_is_thrown_away():
    for headers in (CHUNKED, [(b"content-length", b"3000")]):
        sent, seen, read = exchange([b"x" * 600] * 5, headers)
        assert [message.get("status") for message in sent] == [413, None, None]
        assert b'"error"' in sent[1]["body"]
        assert (b"connection", b"close") in sent[0]["headers"]
        assert not seen
        assert read == 5


def test_a_body_with_two_lengths_is_refused():
    headers = [(b"content-length", b"2"), (b"transfer-encoding", b"chunked")]
    sent, seen, _ = exchange([b"{}"], headers)
    assert [message.get("status") for message in sent] == [400, None, None]
    assert (b"connection", b"close") in sent[0]["headers"]
    assert not seen


def test_a_compressed_body_is_not_unpacked():
    for encoding in (b"gzip", b"br", b"identity, gzip"):
        sent, seen, _ = exchange([b"\x1f\x8b"], [(b"content-encoding", encoding)])
        assert sent[0]["status"] == 415
        assert not seen
    assert exchange([b"{}"], [(b"content-encoding", b"Identity")])[1]


def test_an_endless_body_is_not_read_to_its_end():
    sent, _, read = exchange([b"x" * 1000] * 1000, CHUNKED)
    assert sent[0]["status"] == 413
    assert read < 20
