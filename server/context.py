"""The context of a request: the engine, configuration, metrics and tenants of its server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from fastapi import Depends, Request

from radix import Namespace
from runtime.config import Config
from runtime.frontend.adapters import Adapter
from runtime.frontend.async_engine import AsyncEngine
from server.admin.journal import Journal
from server.admin.metrics import Metrics
from server.auth.keys import PUBLIC, Tenant
from server.documents.store import DocumentStore
from server.explain.answers import Answers
from server.http.errors import NotFound
from server.http.gate import Gate
from server.responses.store import ResponseStore
from server.schemas.store import SchemaStore


class _ForModel(Protocol):
    """A body that asks for a model, and says with whom it shares cached pages."""

    model: str | None
    cache_salt: str | None
    cache_scope: Literal["private", "public"]


@dataclass(frozen=True, slots=True)
class Context:
    engine: AsyncEngine
    config: Config
    metrics: Metrics
    tenants: list[Tenant]
    gate: Gate
    schemas: SchemaStore
    documents: DocumentStore
    answers: Answers
    responses: ResponseStore
    journal: Journal

    def adapter(self, name: str | None) -> Adapter | None:
        """The adapter that a model's name means, `ADAPTER` or `MODEL:ADAPTER`; None: the model, as without a name.

        Raises NotFound unless it is a name of one of them.
        """
        own, adapters = self.engine.info.name, self.engine.adapters
        if not name or name in adapters.models(own):
            return None
        if (found := adapters.named(name, own)) is not None or self.config.model.any_model_name:
            return found
        message = f"the model {name!r} does not exist; this server has {own!r}{adapters.nearest(name, own)}"
        raise NotFound(message, param="model", code="model_not_found")

    def check_model(self, name: str | None) -> str:
        """The name of the asked model, as answers show it. Raises NotFound as `adapter`."""
        return self.engine.info.name if (adapter := self.adapter(name)) is None else adapter.name

    def namespace(self, tenant: Tenant, body: _ForModel) -> Namespace:
        """The cache namespace of a request. Raises NotFound, and Forbidden for a scope that is not the key's."""
        namespace, adapter = tenant.namespace(body.cache_salt, body.cache_scope), self.adapter(body.model)
        return namespace if adapter is None else namespace._replace(adapter=adapter.digest)

    def tenant_name(self, account: str) -> str:
        """A tenant of the cache as the operator calls its key; empty on an open server."""
        if account == PUBLIC:
            return account
        return next((tenant.name for tenant in self.tenants if tenant.account == account), "")


def get_context(request: Request) -> Context:
    return request.app.state.context


Ctx = Annotated[Context, Depends(get_context)]
