"""Adapters that the engine holds, by the digest that is part of their requests' namespaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.errors import InvalidRequest, ModelError
from runtime.execution.executor import Executor
from runtime.models.adapters.lora import read_lora
from runtime.protocol import LoadAdapter, UnloadAdapter
from runtime.request import Request


class Adapters:
    """Adapters, each of which stays until no request uses it.

    Args:
        executor: computes with them.
        live: the live requests.

    Attributes:
        requests: how many came for each, by digest.
    """

    def __init__(self, executor: Executor, live: Mapping[str, Request]):
        self._executor, self._live = executor, live
        self._leaving: set[str] = set()
        self.requests: Counter[str] = Counter()

    def load(self, message: LoadAdapter) -> dict[str, Any]:
        """Read an adapter between two steps: `{"digest", "rank"}`, or `{"failed": why}`."""
        try:
            adapter = read_lora(Path(message.path))
            self._executor.load_adapter(adapter)
        except (ModelError, MemoryError) as error:
            return {"failed": str(error)}
        self._leaving.discard(adapter.digest)
        self.requests.setdefault(adapter.digest, 0)
        return {"digest": adapter.digest, "rank": adapter.rank}

    def unload(self, message: UnloadAdapter) -> dict[str, Any]:
        """Forget an adapter, once its requests have ended: `{"running": how many there are}`."""
        running = self._running(message.digest)
        self._leaving.add(message.digest)
        self._drop_unused()
        return {"running": running}

    def check(self, request: Request) -> None:
        """Count a request. Raises InvalidRequest if its adapter was unloaded since it was accepted."""
        if digest := request.namespace.adapter:
            if digest not in self.requests:
                raise InvalidRequest("the adapter was unloaded", param="model", code="model_not_found")
            self.requests[digest] += 1

    def ended(self) -> None:
        """A request has ended."""
        if self._leaving:
            self._drop_unused()

    def _running(self, digest: str) -> int:
        return sum(request.namespace.adapter == digest for request in self._live.values())

    def _drop_unused(self) -> None:
        for digest in [digest for digest in self._leaving if not self._running(digest)]:
            self._executor.drop_adapter(digest)
            self._leaving.remove(digest)
            del self.requests[digest]
