"""`ramet serve`: one engine, one HTTP server, one exit code."""

import asyncio
import atexit
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI

from runtime.config import Config
from runtime.errors import RametError
from runtime.frontend.async_engine import AsyncEngine
from server.admin.dashboard import Feed
from server.app import create_app, prepare
from server.auth.keys import ENVIRONMENT, Tenant
from server.http.connections import SEND_BUFFER_BYTES, HttpConnection
from server.http.context import find
from server.http.listener import Listener, most_connections
from server.http.pages import Hosts
from server.http.shutdown import ShutdownFlag
from server.signals import Signals
from server.telemetry.journal import Trace, open_trace

log = logging.getLogger("ramet.server")

EXIT_ENGINE_DIED = 70
EXIT_FORCED = 1

# Seconds until an idle connection is closed.
_IDLE_S = 75
# Seconds for aborted requests to send their last events.
_ABORT_S = 3

# Seconds between two checks for open requests during the drain.
_DRAIN_POLL_S = 0.05

_BACKLOG = 2048


class BadCertificate(RametError):
    """The certificate or its key cannot be read."""


class CannotListen(RametError):
    """The address is in use, or does not belong to this machine."""

    def __init__(self, config: Config, error: OSError):
        super().__init__(f"cannot listen on {config.server.host}:{config.server.port}: {error.strerror}")


def serve(config: Config) -> NoReturn:
    """Serve, then exit: code 0 after a signal, 1 if a second signal forced the end, 70 if the engine died.

    Raises:
        RametError: if the server cannot start.
    """
    engine, tenants = prepare(config)
    given = os.environ.pop(ENVIRONMENT, "")  # the engine and other processes of the server need no keys
    _check_certificate(config)
    _check_replays(config, tenants)
    most_connections(config.scheduler)
    _warn(config, tenants)
    if "model" not in config.model.model_fields_set:
        from server.commands.models import advice

        log.info("%s", advice(config))
    trace = open_trace(config.server.record_trace, tenants)
    with _bind(config) as listener:
        asyncio.run(_serve(config, listener, engine, tenants, given, trace))


def _check_certificate(config: Config) -> None:
    """Raise BadCertificate if `--ssl-certfile` cannot be used."""
    if (certificate := config.server.ssl_certfile) is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(*_pem(certificate))
        except (OSError, ValueError) as error:
            raise BadCertificate(f"--ssl-certfile {certificate} cannot be used: {error}") from None


def _pem(certificate: str) -> tuple[str, str | None]:
    """The files of a certificate and of its key; None: the same file."""
    first, _, second = certificate.partition(",")
    return first, second or None


def _check_replays(config: Config, tenants: list[Tenant]) -> None:
    """Raise RametError if other machines could ask for the KV events of keys: the socket asks for no key."""
    endpoint = config.cache.replay_endpoint
    is_local = not endpoint.startswith("tcp:") or Hosts(urlsplit(endpoint).hostname or "", []).own_machine
    if tenants and not is_local:
        raise RametError(
            f"--kv-events PUBLISH,{endpoint}: with --api-keys, replays are for this machine alone; "
            "give tcp://127.0.0.1:PORT, or ipc:// in a private directory"
        )


def _warn(config: Config, tenants: list[Tenant]) -> None:
    if not tenants and not Hosts(config.server.host, []).own_machine:
        most = "is admin" if config.server.open_admin else "may use all but the routes for admins (see --open-admin)"
        log.warning("no --api-keys: anyone who can reach this server %s", most)
    if tenants and config.cache.kv_events is not None and config.cache.kv_events_of == "public":
        log.warning("KV events contain only public prefixes; --kv-events-of all adds those of all keys")


def _bind(config: Config) -> socket.socket:
    """Bind the port. Called before the model is loaded, to report a used port at once."""
    family = socket.AF_INET6 if ":" in config.server.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only if the socket names TCP. With Nagle, small writes wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind((config.server.host, config.server.port))
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise CannotListen(config, error) from None
    return listener


class _Server(uvicorn.Server):
    """uvicorn's server with a drain: it waits for running requests, then aborts the rest.

    During the drain it keeps listening, so that new requests get a 503 instead of a refused connection.
    """

    def __init__(
        self, settings: uvicorn.Config, app: FastAPI, engine: AsyncEngine, shutdown: ShutdownFlag, config: Config
    ):
        super().__init__(settings)
        self.options = config.server
        self.most_connections = most_connections(config.scheduler)
        self.engine = engine
        self.shutdown_flag = shutdown
        self.app = app
        self.feed = find(app, Feed)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Install no signal handlers, because `Signals` has them."""
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start a `Listener`, because asyncio's own server does not limit connections."""
        options = self.options
        assert sockets
        await super().startup(sockets=[])
        limits = (options.trusted_proxies, self.config.ssl, options.client_timeout)
        listener = Listener(sockets[0], self._connect, self.most_connections, *limits)
        self._accepting = asyncio.create_task(listener.accept())

    def _connect(self, on_end: Callable[[], None]) -> HttpConnection:
        state = self.lifespan.state
        own: dict[str, Any] = {"config": self.config, "server_state": self.server_state}
        return HttpConnection(on_end, self.options.client_timeout, state, **own)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        await asyncio.wait((self._accepting,))
        await super().shutdown(sockets)

    async def stop_when_dead(self) -> None:
        """Stop the server once its engine has died."""
        await self.engine.wait_dead()
        self.should_exit = True

    async def stop_when_forced(self, forced: asyncio.Event) -> None:
        """Kill the engine and stop the server once `forced` is set."""
        await forced.wait()
        self.engine.kill()
        self.force_exit = self.should_exit = True

    async def drain(self) -> None:
        """Once shutdown is requested, wait until open requests end or `--drain-time` has passed. Then stop."""
        await self.shutdown_flag.wait()
        self.feed.close()
        log.info("stopping; requests that are running: %d", self.engine.num_open)
        # Tasks count, too, because an accepted request may not have reached the engine yet.
        await _wait_while(lambda: self.engine.num_open or self.server_state.tasks, self.options.drain_time)
        if self.engine.num_open:
            log.warning("%d requests did not end in time and are aborted", self.engine.num_open)
            self.engine.abort(None)
            await _wait_while(lambda: self.engine.num_open, _ABORT_S)
            if self.engine.num_open:
                log.error("the engine does not answer: %d requests are lost", self.engine.num_open)
                self.engine.give_up("the engine does not answer; this request is lost")
        self.should_exit = True


async def _wait_while(open_: Callable[[], object], seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    while open_() and time.monotonic() < deadline_s:
        await asyncio.sleep(_DRAIN_POLL_S)


async def _serve(
    config: Config,
    listener: socket.socket,
    engine: AsyncEngine,
    tenants: list[Tenant],
    given: str,
    trace: Trace | None,
) -> NoReturn:
    shutdown = ShutdownFlag()
    signals = Signals(shutdown)
    log.info("loading %s", config.model.model)
    await _start(engine, shutdown, signals)
    try:
        app = create_app(engine, config, tenants, shutdown, trace)
        server = _make_server(config, listener, engine, app, shutdown)
        watchers = (server.stop_when_dead(), server.drain(), server.stop_when_forced(signals.forced))
        tasks = [asyncio.create_task(work) for work in (*watchers, server.feed.keep_history())]
        if (keys := config.server.api_keys) is not None:
            from server.auth.watch import watch_keys

            tasks.append(asyncio.create_task(watch_keys(keys, given, tenants)))
        await server.serve(sockets=[listener])
    finally:
        await engine.stop()
    _leave(EXIT_FORCED if signals.forced.is_set() else EXIT_ENGINE_DIED if tasks[0].done() else 0)


async def _start(engine: AsyncEngine, shutdown: ShutdownFlag, signals: Signals) -> None:
    """Start the engine. A signal during the start ends the process."""
    starting = asyncio.create_task(engine.start())
    stopped = asyncio.create_task(shutdown.wait())
    await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not stopped.done():
        stopped.cancel()
        return await starting
    starting.cancel()
    await asyncio.wait((starting,))
    if not starting.cancelled() and starting.exception() is None:
        await engine.stop()
    _leave(EXIT_FORCED if signals.forced.is_set() else 0)


def _leave(code: int) -> NoReturn:
    """Exit without waiting for threads, which may be fetching a model or compiling a grammar."""
    atexit._run_exitfuncs()  # they write the last log lines and traces
    os._exit(code)


def _make_server(
    config: Config, listener: socket.socket, engine: AsyncEngine, app: FastAPI, shutdown: ShutdownFlag
) -> _Server:
    """The HTTP server for a started engine. Raises CannotListen."""
    options, info = config.server, engine.info
    log.info(
        "%s (%s, %s on %s, %s attention): context %d tokens, pool %d tokens in pages of %d",
        info.name,
        info.architecture,
        info.dtype,
        info.device,
        info.attention_backend,
        info.context_length,
        info.pool_tokens,
        info.page_size,
    )
    try:
        listener.listen(_BACKLOG)
    except OSError as error:  # another server has taken the port
        raise CannotListen(config, error) from None
    host, port = listener.getsockname()[:2]
    certificate, key = _pem(options.ssl_certfile) if options.ssl_certfile else (None, None)
    settings = uvicorn.Config(
        app,
        ws="none",
        log_level=options.log_level,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_ABORT_S,
        timeout_keep_alive=_IDLE_S,
        proxy_headers=options.trusted_proxies is not None,
        forwarded_allow_ips=options.trusted_proxies,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        server_header=False,
    )
    settings.load()
    scheme = "https" if options.ssl_certfile else "http"
    log.info("serving on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
    return _Server(settings, app, engine, shutdown, config)
