"""The application: routes, errors, limits."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from runtime.client import AsyncEngine
from runtime.config import Config
from server import cache, dashboard, errors, generate, openai_chat, openai_completions, routes
from server.auth import Guard, Tenant
from server.context import Context
from server.errors import ErrorBody
from server.limits import BodyLimit
from server.metrics import Metrics


def create_app(engine: AsyncEngine, config: Config, tenants: list[Tenant]) -> FastAPI:
    """The application over a started engine, for those who have a key (for everyone without tenants)."""
    app = FastAPI(
        title="Ramet",
        version=version("ramet"),
        summary="A serving runtime for language models whose heart is a radix tree over token sequences.",
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    app.state.context = Context(engine, config, Metrics(engine.info.name), tenants)
    app.state.feed = dashboard.Feed(app.state.context)
    for module in (generate, openai_completions, openai_chat, cache, dashboard, routes):
        app.include_router(module.router)
    errors.install(app)
    app.add_middleware(BodyLimit, max_bytes=config.server.max_body_bytes)
    app.add_middleware(Guard, tenants=tenants)  # added last, so it is first: nothing is read for a stranger
    return app
