"""The ingress over replicas that start late or die."""

from __future__ import annotations

import asyncio
import importlib
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import msgspec
import pytest

from runtime.errors import EngineDead
from runtime.protocol import ModelInfo

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
STREAM = START | {"headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
WHOLE = {"type": "http.response.body", "body": b"of a replica"}
PART = WHOLE | {"more_body": True}


@pytest.fixture
def front(monkeypatch) -> ModuleType:
    """`server.ray.front`; without Ray, over stand-ins for what it imports from there."""
    if find_spec("ray") is None:
        names = {"ray": {}, "ray.serve": {}, "ray.serve.handle": {"DeploymentHandle": object}}
        names["ray.exceptions"] = {"RayActorError": type("RayActorError", (Exception,), {})}
        for name, members in names.items():
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
        monkeypatch.delitem(sys.modules, "server.ray.front", raising=False)
    return importlib.import_module("server.ray.front")


class Handle:
    """The part of a deployment's handle that the ingress uses; each call to `forward` gets the next answer.

    An answer is a list of messages; an exception among them is raised.
    """

    def __init__(self, model: str, *answers: list):
        self.there = asyncio.Event()
        self.info, self.forward = SimpleNamespace(remote=self._info), SimpleNamespace(remote=self._forward)
        self._model, self._answers = model, iter(answers)

    def options(self, stream: bool) -> Handle:
        return self

    async def _info(self) -> object:
        await self.there.wait()
        fixed = {"name": "tiny", "path": self._model, "architecture": "llama", "dtype": "float32", "device": "cpu"}
        sizes = {"vocab_size": 49152, "context_length": 512, "page_size": 4, "pool_tokens": 4096}
        return msgspec.to_builtins(ModelInfo(**fixed, **sizes, eos_token_ids=[2], attention_backend="torch"))

    async def _forward(self, *call, hashes):
        for message in next(self._answers):
            if isinstance(message, Exception):
                raise message
            yield message


class Client:
    """A request whose body is empty, and what the ingress sends."""

    scope: ClassVar[dict] = {"type": "http", "method": "GET", "path": "/health", "headers": []}

    def __init__(self):
        self.sent: list[dict] = []
        self.heard = asyncio.Event()

    async def receive(self) -> dict:
        self.heard.set()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(self, message: dict) -> None:
        self.sent.append(message)

    def ask(self, front: ModuleType, options: dict, *answers: list, **scope: object) -> None:
        """Ask an ingress whose replicas are there."""

        async def asked() -> None:
            handle = Handle(options["model"], *answers)
            handle.there.set()
            await front.Front(options, handle).pass_on({**self.scope, **scope}, self.receive, self.send)

        asyncio.run(asked())

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def test_a_client_that_leaves_while_replicas_start_takes_nobody_along(front, tiny_dir):
    client = Client()

    async def leave_and_ask():
        handle = Handle(str(tiny_dir), [START, WHOLE])
        ingress = front.Front({"model": str(tiny_dir)}, handle)
        impatient = asyncio.create_task(ingress.pass_on(client.scope, client.receive, client.send))
        await client.heard.wait()  # the body is there, and it waits for the replicas
        impatient.cancel()
        await asyncio.wait([impatient])
        handle.there.set()
        await ingress.pass_on(client.scope, client.receive, client.send)
        await ingress.check_health()

    asyncio.run(leave_and_ask())
    assert client.sent == [START, WHOLE]


@pytest.mark.parametrize(
    ("answers", "status", "body"),
    [
        ([["dies"], ["dies"], ["dies"], [START, WHOLE]], 200, b"of a replica"),
        ([[START, "dies"], [START, WHOLE]], 200, b"of a replica"),
        ([[START], [START, WHOLE]], 200, b"of a replica"),
        ([[START, PART, WHOLE, "dies"]], 200, b"of a replica" * 2),
        ([["dies"]] * 4, 503, None),
        ([[STREAM, PART, "dies"]], 200, b"[DONE]"),
        ([[STREAM, PART]], 200, b"[DONE]"),
    ],
)
def test_an_answer_that_has_not_begun_comes_from_another_replica(front, tiny_dir, answers, status, body):
    client = Client()
    told = [[front.RayActorError() if one == "dies" else one for one in answer] for answer in answers]
    client.ask(front, {"model": str(tiny_dir)}, *told)
    assert client.sent[0]["status"] == status
    assert [message["type"] for message in client.sent].count("http.response.start") == 1
    assert not client.sent[-1].get("more_body", False)
    if body == b"[DONE]":
        assert client.body.startswith(PART["body"])
        assert EngineDead.type.encode() in client.body
        assert client.body.endswith(b"data: [DONE]\n\n")
    elif body is not None:
        assert client.body == body


def test_an_answer_that_breaks_off_and_is_no_stream_is_cut(front, tiny_dir):
    client = Client()
    with pytest.raises(EngineDead, match="this request is lost"):
        client.ask(front, {"model": str(tiny_dir)}, [START, PART, front.RayActorError()])
    assert client.sent == [START, PART]


@pytest.mark.parametrize(
    ("header", "status"),
    [((b"authorization", b"Bearer of-nobody"), 401), ((b"origin", b"http://elsewhere"), 403)],
)
def test_a_body_is_read_once_its_client_may_send_it(front, tiny_dir, tmp_path, header, status):
    (tmp_path / "keys").write_text("alice alice-secret-key\n* a-secret-of-two-servers-and-of-no-one-else\n")
    client = Client()
    headers = [(b"content-length", b"9"), (b"host", b"here"), header]

    async def receive() -> dict:
        assert client.sent, "the body is read before the client is answered"
        return {"type": "http.disconnect"}

    client.receive = receive
    options = {"model": str(tiny_dir), "api_keys": tmp_path / "keys"}
    client.ask(front, options, method="POST", path="/generate", headers=headers)
    assert client.sent[0]["status"] == status


def test_a_page_of_an_allowed_origin_needs_no_key_to_ask_whether_it_may_send(front, tiny_dir, tmp_path):
    (tmp_path / "keys").write_text("alice alice-secret-key\n")
    client = Client()
    headers = [(b"origin", b"http://page"), (b"access-control-request-method", b"POST")]
    options = {"model": str(tiny_dir), "api_keys": tmp_path / "keys", "cors_origins": "http://page"}
    client.ask(front, options, method="OPTIONS", path="/generate", headers=headers)
    assert client.sent[0]["status"] == 200
    assert (b"access-control-allow-origin", b"http://page") in client.sent[0]["headers"]
