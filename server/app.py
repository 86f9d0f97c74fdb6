"""The FastAPI application: routes, error handlers, middleware."""

import os
import pkgutil
from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.config import Config
from runtime.features.registry import open_preparers
from runtime.frontend.async_engine import AsyncEngine
from runtime.logs import set_up_logs
from server import admin, anthropic, errors, openai, responses, sglang
from server.admin.dashboard import Feed
from server.auth.keys import ANYONE, EVERYONE, Guard, Tenant, read_keys, routes_of
from server.errors import ErrorBody
from server.explain.answers import Answers
from server.features.registry import ROOMS, open_stores
from server.generation.service import GenerationService
from server.generation.store import ResponseStore
from server.http.access import AccessLog
from server.http.admission import AdmissionMiddleware, Check
from server.http.context import Context, provide
from server.http.limits import BodyLimit
from server.http.openapi import describe
from server.http.pages import APPS, Hosts, Origins
from server.http.shutdown import ShutdownFlag
from server.openai.prompt import ChatPrompts
from server.telemetry.journal import Journal, Trace
from server.telemetry.metrics import Metrics


def find_routers(package: ModuleType) -> list[APIRouter]:
    """All routers in a package's modules, so that a new route needs no registration."""
    names = (module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))
    return [found for name in names for found in vars(import_module(name)).values() if isinstance(found, APIRouter)]


def prepare(config: Config) -> tuple[AsyncEngine, list[Tenant]]:
    """Set up logging and read the API keys. Returns an engine that is not started, and the tenants.

    Raises:
        RametError: if the file of keys cannot be used.
    """
    set_up_logs(config.server.log_level, config.server.log_format)
    # Texts are tokenized one by one. With threads of its own, the library would warn about each new process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tenants = read_keys(config.server.api_keys)
    quotas = {tenant.account: tenant.quota for tenant in tenants if tenant.quota is not None}
    return AsyncEngine(config, quotas, open_preparers=open_preparers), tenants


def create_app(
    engine: AsyncEngine,
    config: Config,
    tenants: list[Tenant],
    shutdown: ShutdownFlag | None = None,
    trace: Trace | None = None,
) -> FastAPI:
    """The application over a started engine. Without tenants no route needs an API key."""
    app = FastAPI(
        title="Ramet",
        version=version("ramet"),
        summary="A serving runtime for language models whose heart is a radix tree over token sequences.",
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; ours is in admin/dashboard.py
        redoc_url=None,
        redirect_slashes=False,  # a redirect would trust the client's Host header
    )
    metrics, journal, answers = Metrics(engine.info.name), Journal(trace), Answers()
    context = Context(engine, config, tenants, shutdown or ShutdownFlag())
    stores = open_stores()
    service = GenerationService(context, metrics, journal, answers)
    feed, chats = Feed(context, metrics, journal), ChatPrompts(context, stores)
    provide(app, context, metrics, service, stores, *stores, ResponseStore(), chats, feed)
    for router in _routers():
        app.include_router(router)
        _add_heads(app, router)
    errors.install(app, [route.path for router in _routers() for route in routes_of(router)])
    describe(app, bool(tenants))
    # The middleware added last runs first.
    app.add_middleware(admit, config=config, tenants=tenants)
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        from server.http.traces import add_traces

        add_traces(app)
    app.add_middleware(AccessLog, count=metrics.count_request)
    return app


def admit(app: ASGIApp, config: Config, tenants: list[Tenant]) -> ASGIApp:
    """An application behind all that a request must pass before its body is read."""
    options = config.server
    origins, hosts = _split(options.cors_origins), Hosts(options.host, _split(options.allowed_hosts))
    anyone = EVERYONE if options.open_admin or hosts.own_machine else ANYONE
    guard = Guard(tenants, _routers(), anyone)
    pages = Origins(origins, hosts.own_machine)
    checks: list[Check] = [pages.check, guard.check]
    if not tenants and "*" not in origins:
        checks.append(hosts.check)
    limit = BodyLimit(options.client_timeout)
    admitted = AdmissionMiddleware(app, checks, limit, guard.is_route)
    apps = APPS if hosts.own_machine else None
    shared = CORSMiddleware(
        admitted, allow_origins=origins, allow_origin_regex=apps, allow_methods=["*"], allow_headers=["*"]
    )

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        origin = dict(scope.get("headers", ())).get(b"origin")
        await (shared if pages.allows(origin) else admitted)(scope, receive, send)

    return choose


def _routers() -> list[APIRouter]:
    rooms = (sglang, openai, responses, anthropic, *ROOMS, admin)
    return [router for room in rooms for router in find_routers(room)]


def _add_heads(app: FastAPI, router: APIRouter) -> None:
    """Answer HEAD on all routes with GET, except the endless stream of events."""
    for route in router.routes:
        if isinstance(route, APIRoute) and route.methods == {"GET"} and route.path != "/dashboard/events":
            app.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], include_in_schema=False, response_model=None
            )


def _split(names: str | None) -> list[str]:
    return [name.strip() for name in names.split(",")] if names else []
