"""The objects that routes get through FastAPI's `Depends`: engine, configuration, stores and others."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request
from msgspec.structs import replace

from runtime.calls import Owned
from runtime.config import Config
from runtime.frontend.adapters import Adapter
from runtime.frontend.async_engine import AsyncEngine
from runtime.models.resolve import serves_any_name
from server.auth.keys import PUBLIC, Tenant
from server.errors import Forbidden, NotFound
from server.http.shutdown import ShutdownFlag

T = TypeVar("T")
Entry = TypeVar("Entry", bound=Owned)


def _files(directory: Path) -> list[Path]:
    """What a directory has, without symbolic links; nothing if it cannot be read, as its reader will say."""
    with suppress(OSError):
        return [Path(os.path.realpath(file)) for file in directory.iterdir()]
    return []


@dataclass(frozen=True, slots=True)
class Context:
    """The server's engine, configuration, API keys and shutdown flag."""

    engine: AsyncEngine
    config: Config
    tenants: list[Tenant]
    shutdown: ShutdownFlag

    def adapter(self, name: str | None) -> Adapter | None:
        """The adapter named `ADAPTER` or `MODEL:ADAPTER`; None for the model's own names, and without a name.

        Raises NotFound for unknown names.
        """
        own, adapters = self.engine.info.name, self.engine.adapters
        if not name or name in adapters.models(own):
            return None
        if (found := adapters.named(name, own)) is not None or serves_any_name(self.config.model):
            return found
        message = f"the model {name!r} does not exist; this server has {own!r}{adapters.nearest(name, own)}"
        raise NotFound(message, param="model", code="model_not_found")

    def below_root(self, given: str, param: str) -> str:
        """The real path of a directory whose files are below the root. Raises Forbidden, which names no file."""
        root = self.config.tiers.admin_root
        if root is not None and os.path.isabs(given) and "\0" not in given:
            path, above = Path(os.path.realpath(given)), Path(os.path.realpath(root))
            if above in path.parents and all(above in file.parents for file in _files(path)):
                return str(path)
        raise Forbidden("the path must be absolute, and below --admin-root", param=param)

    def check_model(self, name: str | None) -> str:
        """The name of the requested model or adapter for answers. Raises NotFound for unknown names."""
        return self.engine.info.name if (adapter := self.adapter(name)) is None else adapter.name

    def tenant_name(self, account: str) -> str:
        """The operator's name for an account; empty on an open server."""
        if account == PUBLIC:
            return account
        return next((tenant.name for tenant in self.tenants if tenant.account == account), "")

    def named(self, entry: Entry) -> Entry:
        """An entry with the tenant's name in place of its account."""
        return replace(entry, tenant=self.tenant_name(entry.tenant))

    def tenant(self, name: str) -> Tenant:
        """The tenant with this name. Raises NotFound."""
        for tenant in self.tenants:
            if tenant.name == name:
                return tenant
        raise NotFound(f"there is no API key named {name!r}", param="tenant", code="tenant_not_found")

    def visible(self, asker: Tenant, name: str | None) -> Tenant | None:
        """The tenant whose data `asker` may see under this name; None: all tenants. Raises Forbidden, NotFound."""
        if not asker.admin and name not in (None, asker.name):
            raise Forbidden("this key may only see its own data", param="tenant")
        if name is not None:
            return self.tenant(name)
        return None if asker.admin else asker


def provide(app: FastAPI, *objects: object) -> None:
    """Store the objects that routes depend on, one of each class."""
    app.state.provided = {type(each): each for each in objects}


def find(app: FastAPI, kind: type[T]) -> T:
    """The provided object of a class."""
    return app.state.provided[kind]


def erase(app: FastAPI, account: str) -> None:
    """Erase an account from the provided objects that keep something of it, which have a method `erase`."""
    for each in app.state.provided.values():
        if (erase_there := getattr(each, "erase", None)) is not None:
            erase_there(account)


def provided(kind: type[T]) -> Any:
    """A FastAPI dependency on the provided object of a class."""

    async def get(request: Request) -> T:  # async, because FastAPI would call a plain `def` in a thread
        return find(request.app, kind)

    return Depends(get)


Ctx = Annotated[Context, provided(Context)]
