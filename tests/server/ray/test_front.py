"""The ingress over replicas that are not there yet."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("ray", reason="needs ray: pip install 'ramet[ray]'")

from runtime.protocol import ModelInfo
from server.ray.front import Front


class Handle:
    """As much of a deployment's handle as the ingress asks of it; nobody answers before `there`."""

    def __init__(self, model: str):
        self.there = asyncio.Event()
        self.info, self.forward = SimpleNamespace(remote=self._info), SimpleNamespace(remote=self._forward)
        self._model = model

    def options(self, stream: bool) -> Handle:
        return self

    async def _info(self) -> object:
        await self.there.wait()
        fixed = {"name": "tiny", "path": self._model, "architecture": "llama", "dtype": "float32", "device": "cpu"}
        sizes = {"vocab_size": 49152, "context_length": 512, "page_size": 4, "pool_tokens": 4096}
        return msgspec.to_builtins(ModelInfo(**fixed, **sizes, eos_token_ids=[2], attention_backend="cpu"))

    async def _forward(self, *call, hashes):
        yield {"type": "http.response.start", "status": 200, "headers": []}
        yield {"type": "http.response.body", "body": b"of a replica"}


def test_a_client_that_leaves_while_replicas_start_takes_nobody_along(tiny_dir):
    sent: list[dict] = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    async def leave_and_ask():
        handle = Handle(str(tiny_dir))
        front = Front({"model": str(tiny_dir)}, handle)
        scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}
        impatient = asyncio.create_task(front.pass_on(scope, receive, send))
        await asyncio.sleep(0.05)  # it waits for the replicas
        impatient.cancel()
        await asyncio.wait([impatient])
        handle.there.set()
        await front.pass_on(scope, receive, send)
        await front.check_health()

    asyncio.run(leave_and_ask())
    assert [message.get("body") for message in sent] == [None, b"of a replica"]
