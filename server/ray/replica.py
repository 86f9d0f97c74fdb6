"""A replica: an engine and the server's whole application, called through Ray."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import ray
from starlette.types import Message, Scope

from runtime.calls import Ping
from runtime.config import make_config
from server.app import create_app, prepare
from server.serve import EXIT_ENGINE_DIED


class Replica:
    """Serves requests. When its engine dies, its process exits, so that Serve and waiting calls notice at once."""

    def __init__(self, options: dict[str, Any]):
        """`options`: the options of `ramet serve`, by field name."""
        self._options = options
        self._ready = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        host = ray.util.get_node_ip_address()
        self.metadata = {name: f"tcp://{host}:{_free_port(host)}" for name in ("events", "replay")}
        endpoints = ",".join(self.metadata.values())
        options = self._options | {"kv_events": endpoints, "kv_events_of": "hashes"}
        config = make_config(**options)
        self._engine, tenants = prepare(config)
        await self._engine.start()
        self._app = create_app(self._engine, config, tenants)
        self._watch = asyncio.create_task(self._end_with_engine())

    async def _end_with_engine(self) -> None:
        await self._engine.wait_dead()
        os._exit(EXIT_ENGINE_DIED)

    async def info(self) -> dict[str, Any]:
        """The fields of `ModelInfo`."""
        await self._ready
        return msgspec.to_builtins(self._engine.info)

    async def forward(self, scope: Scope, body: bytes, hashes: bytes = b"") -> AsyncIterator[Message]:
        """Yields the application's ASGI messages for a request. Closing aborts it. Only the router uses `hashes`."""
        await self._ready
        messages: asyncio.Queue[Message | None] = asyncio.Queue()  # unbounded, as an answer has a limited size
        pending = [body]

        async def receive() -> Message:
            if not pending:
                await asyncio.Event().wait()  # forever: Ray cancels the task if the client disconnects
            return {"type": "http.request", "body": pending.pop(), "more_body": False}

        async def run() -> None:
            try:
                await self._app({**scope, "state": {}}, receive, messages.put)
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                if not self._engine.alive:
                    await asyncio.Event().wait()  # this process is about to exit; then another replica answers
                yield message
            await task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def record_replica_metadata(self) -> dict[str, str]:
        """Called by Serve, which passes these endpoints of KV events to the router."""
        await self._ready
        return self.metadata

    async def check_health(self) -> None:
        """Called by Serve. Raises EngineDead."""
        await self._ready
        await self._engine.call(Ping())

    async def __del__(self) -> None:
        """Called by Serve after all requests have ended or `--drain-time` has passed."""
        if self._ready.done() and not self._ready.exception():
            self._watch.cancel()
            await self._engine.stop()


def _free_port(host: str) -> int:
    with socket.socket() as one:
        one.bind((host, 0))
        return int(one.getsockname()[1])
