"""The context of a request: the engine, configuration, metrics and tenants of its server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from runtime.config import Config
from runtime.frontend.async_engine import AsyncEngine
from runtime.models.resolve import known_names
from server.admin.journal import Journal
from server.admin.metrics import Metrics
from server.auth.keys import PUBLIC, Tenant
from server.documents.store import DocumentStore
from server.explain.answers import Answers
from server.http.errors import NotFound
from server.http.gate import Gate
from server.responses.store import ResponseStore
from server.schemas.store import SchemaStore


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

    def check_model(self, name: str | None) -> None:
        """Raise NotFound unless this is a name of the served model; no name is one."""
        own = self.engine.info.name
        if not name or self.config.model.any_model_name or name in (own, *known_names(self.config.model)):
            return
        message = f"the model {name!r} does not exist; this server has {own!r}"
        raise NotFound(message, param="model", code="model_not_found")

    def tenant_name(self, account: str) -> str:
        """A tenant of the cache as the operator calls its key; empty on an open server."""
        if account == PUBLIC:
            return account
        return next((tenant.name for tenant in self.tenants if tenant.account == account), "")


def get_context(request: Request) -> Context:
    return request.app.state.context


Ctx = Annotated[Context, Depends(get_context)]
