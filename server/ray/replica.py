"""A replica: an engine with the server's whole application over it, called through Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import ray
from starlette.types import Message, Scope

from runtime.config import make_config
from runtime.frontend.async_engine import AsyncEngine
from runtime.logs import set_up_logs
from server.auth.keys import read_keys
from server.http.app import create_app
from server.http.gate import Gate
from server.serve import EXIT_ENGINE_DIED

# Weight of the newest request in the mean time to first token, and seconds without any after which it says nothing.
_NEWEST, _STALE_S = 0.2, 60.0


class Replica:
    """Serves requests until its engine dies; then the process ends, so that all who wait for it learn it at once."""

    def __init__(self, options: dict[str, Any]):
        """`options`: of the configuration, by their flat names."""
        self._options = options
        self._ttft_s, self._measured_s = 0.0, 0.0
        self._ready = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        host = ray.util.get_node_ip_address()
        self.metadata = {name: f"tcp://{host}:{_free_port(host)}" for name in ("events", "replay")}
        events = {"kv_events": self.metadata["events"], "kv_events_replay": self.metadata["replay"]}
        # A dead engine ends its replica; Serve starts another one.
        own = {**events, "kv_events_of": "hashes", "on_engine_death": "exit"}
        config = make_config(**{**self._options, **own})
        set_up_logs(config.server.log_level, config.server.log_format)
        tenants = read_keys(config.server.api_keys)
        quotas = {tenant.account: tenant.quota for tenant in tenants if tenant.quota is not None}
        self._gate = Gate()
        self._engine = AsyncEngine(config, quotas)
        await self._engine.start()
        self._app = create_app(self._engine, config, tenants, self._gate)
        self._watch = asyncio.create_task(self._end_with_engine())

    async def _end_with_engine(self) -> None:
        await self._engine.wait_dead()
        os._exit(EXIT_ENGINE_DIED)

    async def info(self) -> dict[str, Any]:
        """The fields of `ModelInfo`."""
        await self._ready
        return msgspec.to_builtins(self._engine.info)

    async def forward(self, scope: Scope, body: bytes, hashes: bytes = b"") -> AsyncIterator[Message]:
        """The application's ASGI messages for a request; `hashes` is for the router. To close it aborts the request."""
        await self._ready
        messages: asyncio.Queue[Message | None] = asyncio.Queue()  # no larger than the answer
        pending, began_s = [body], time.monotonic()

        async def receive() -> Message:
            if not pending:
                await asyncio.Event().wait()  # a client that leaves cancels the task
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
                    await asyncio.Event().wait()  # another replica serves it: this process is about to end
                if message["type"] == "http.response.body" and message.get("body") and began_s:
                    self._note(time.monotonic() - began_s)
                    began_s = 0.0
                yield message
            await task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _note(self, ttft_s: float) -> None:
        now_s = time.monotonic()
        fresh = now_s < self._measured_s + _STALE_S
        self._ttft_s = self._ttft_s + _NEWEST * (ttft_s - self._ttft_s) if fresh else ttft_s
        self._measured_s = now_s

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: the mean time to first byte of the last requests, in seconds."""
        return {"ttft_s": self._ttft_s if time.monotonic() < self._measured_s + _STALE_S else 0.0}

    async def record_replica_metadata(self) -> dict[str, str]:
        """Serve's hook: where the router finds the KV events."""
        await self._ready
        return self.metadata

    async def check_health(self) -> None:
        """Serve's hook; it raises EngineDead."""
        await self._ready
        await self._engine.state()

    async def __del__(self) -> None:
        """Serve's hook, once all requests have ended, or had their time to."""
        if self._ready.done() and not self._ready.exception():
            self._watch.cancel()
            await self._engine.stop()


def _free_port(host: str) -> int:
    with socket.socket() as one:
        one.bind((host, 0))
        return int(one.getsockname()[1])
