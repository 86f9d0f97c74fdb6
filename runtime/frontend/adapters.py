"""Adapters by the names that clients use. The engine identifies them by digest."""

import asyncio
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol, TypeVar

from runtime.calls import EngineCall, LoadAdapter, UnloadAdapter
from runtime.config import ModelConfig
from runtime.errors import InvalidRequest, ModelError
from runtime.models.resolve import known_names

log = logging.getLogger("ramet.client")

_NAME = re.compile(r"[\w.@/-]{1,128}")
A = TypeVar("A")


class _Caller(Protocol):
    async def __call__(self, call: EngineCall[A]) -> A: ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded low-rank adapter.

    Attributes:
        path: the adapter's directory.
        digest: digest of the adapter's configuration and weights.
        rank: rank of the adapter's matrices.
    """

    name: str
    path: str
    digest: str
    rank: int


class Adapters:
    """The loaded adapters.

    Args:
        call: sends a call to the engine and returns the answer.
        config: the model's configuration; adapters cannot have the model's names.
    """

    def __init__(self, call: _Caller, config: ModelConfig):
        self._call = call
        self._config = config
        self._changing = asyncio.Lock()
        self._loaded: dict[str, Adapter] = {}

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._loaded.values()))

    def named(self, name: str, own: str) -> Adapter | None:
        """The adapter with the name `ADAPTER` or `MODEL:ADAPTER`, or None; `own`: the model's name in answers."""
        base, _, last = name.rpartition(":")
        return self._loaded.get(name) or (self._loaded.get(last) if base in self.models(own) else None)

    def models(self, own: str) -> set[str]:
        """Names that mean the model itself."""
        return {own, *known_names(self._config)}

    def nearest(self, name: str, own: str) -> str:
        """The end of an error about an unknown name: "; did you mean ...?", or empty if no name is similar."""
        whole = [f"{own}:{each}" for each in self._loaded]
        meant = get_close_matches(name[:256], [own, *self._loaded, *whole], 1)
        return f"; did you mean {meant[0]!r}?" if meant and meant[0] != own else ""

    async def load(self, name: str, path: str, replace: bool = False) -> Adapter:
        """Load an adapter; `replace`: another adapter of the same name is replaced.

        Raises:
            InvalidRequest: if the name is taken or not allowed, or the adapter cannot be served.
        """
        if not _NAME.fullmatch(name) or name in known_names(self._config):
            rule = "letters, digits and . _ @ / -, up to 128, and not the model's own"
            raise InvalidRequest(f"{name[:128]!r} cannot be an adapter's name: {rule}", param="lora_name")
        async with self._changing:
            before = self._loaded.get(name)
            if before is not None and not replace:
                message = f"the adapter {name!r} is loaded already; load_inplace replaces it"
                raise InvalidRequest(message, param="lora_name")
            loaded = await self._call(LoadAdapter(path))
            self._loaded[name] = adapter = Adapter(name, path, loaded.digest, loaded.rank)
            if before is not None:
                await self._leave(before)
        log.info("adapter %s of rank %d is loaded from %s", name, adapter.rank, path)
        return adapter

    async def unload(self, name: str) -> int | None:
        """Refuse new requests for an adapter; returns how many requests still use it. None: the name is unknown."""
        async with self._changing:
            adapter = self._loaded.pop(name, None)
            return None if adapter is None else await self._leave(adapter)

    async def _leave(self, adapter: Adapter) -> int:
        if any(other.digest == adapter.digest for other in self._loaded.values()):
            return 0
        return await self._call(UnloadAdapter(adapter.digest))

    async def open(self) -> None:
        """Load the adapters of `--lora`. Raises ModelError if an adapter cannot be served."""
        for name, path in self._config.adapters:
            try:
                await self.load(name, path)
            except InvalidRequest as error:
                raise ModelError(f"--lora {name}={path}: {error.message}") from None
