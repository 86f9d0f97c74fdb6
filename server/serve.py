"""`ramet serve`: one engine, one HTTP server, one exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from types import FrameType

import uvicorn

from runtime.config import Config
from runtime.errors import RametError
from runtime.frontend.async_engine import AsyncEngine
from runtime.logs import set_up_logs
from server.admin.dashboard import Feed
from server.auth.keys import Tenant, read_keys
from server.http.app import create_app
from server.http.connections import SEND_BUFFER_BYTES, Connection
from server.http.gate import Gate
from server.http.listener import Listener
from server.http.seats import Seat, most_connections

log = logging.getLogger("ramet.server")

EXIT_ENGINE_DIED = 70
EXIT_FORCED = 1

# Time for aborted requests to send their last events.
_ABORT_S = 3

# Interval at which a draining server looks for open requests.
_DRAIN_POLL_S = 0.05

_BACKLOG = 2048


class BadCertificate(RametError):
    """The certificate or its key cannot be read."""


class CannotListen(RametError):
    """The address is in use, or does not belong to this machine."""

    def __init__(self, config: Config, error: OSError):
        super().__init__(f"cannot listen on {config.server.host}:{config.server.port}: {error.strerror}")


def serve(config: Config) -> int:
    """Serve until SIGTERM or SIGINT (returns 0) or the engine's death (70). Raises RametError if it cannot start."""
    set_up_logs(config.server.log_level, config.server.log_format)
    # Texts are tokenized one by one, and the library warns about each new process once it has threads of its own.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    tenants = read_keys(config.server.api_keys)
    config.server.max_connections = most_connections(config)
    with _bind(config) as listener:
        return asyncio.run(_serve(config, listener, tenants))


def _bind(config: Config) -> socket.socket:
    """Bind the port before the model is loaded, so that a port in use is an error at once."""
    family = socket.AF_INET6 if ":" in config.server.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that name TCP; with it, each small write waits 40 ms.
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
    """uvicorn's server with a drain: it refuses new requests, waits for running ones, and aborts the rest.

    It keeps listening while it drains, so that new requests get a 503 and not a refused connection.
    """

    def __init__(self, settings: uvicorn.Config, engine: AsyncEngine, gate: Gate, feed: Feed, config: Config):
        super().__init__(settings)
        self.options = config.server
        self.engine = engine
        self.gate = gate
        self.feed = feed
        self._signalled = False
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal, whether or not `/shutdown` came before it; end at once on the second."""
        if self._signalled:
            log.warning("a second signal: running requests are lost")
            self.force_exit = self.should_exit = True
            self.engine.kill()
        self._signalled = True
        self._loop.call_soon_threadsafe(self.gate.close)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections by `Listener`, in place of asyncio's server, which knows no bound on them."""
        options = self.options
        assert sockets
        assert options.max_connections  # `serve` has filled it in
        await super().startup(sockets=[])
        limits = (options.trusted_proxies, self.config.ssl, options.client_timeout)
        listener = Listener(sockets[0], self._connect, options.max_connections, *limits)
        self._accepting = asyncio.create_task(listener.accept())

    def _connect(self, seat: Seat) -> Connection:
        state = self.lifespan.state
        return Connection(seat, self.options.client_timeout, state, config=self.config, server_state=self.server_state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        await asyncio.wait((self._accepting,))
        await super().shutdown(sockets)

    async def drain(self) -> None:
        """Wait for the gate to close, then for open requests to end or `drain_s` to pass; then stop the server."""
        await self.gate.wait_closed()
        self.feed.close()
        log.info("stopping: %d requests are running", self.engine.num_open)
        deadline_s = self._loop.time() + self.options.drain_time
        # An accepted request may not have reached the engine yet; its task counts as well.
        while (self.engine.num_open or self.server_state.tasks) and self._loop.time() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        if self.engine.alive and self.engine.num_open:
            log.warning("%d requests did not end in time and are aborted", self.engine.num_open)
            self.engine.abort(None)
        self.should_exit = True


async def _serve(config: Config, listener: socket.socket, tenants: list[Tenant]) -> int:
    options = config.server
    log.info("loading %s", config.model.model)
    engine = AsyncEngine(config, {tenant.account: tenant.quota for tenant in tenants if tenant.quota is not None})
    await engine.start()
    try:
        info = engine.info
        log.info(
            "%s (%s, %s on %s, %s attention): context %d tokens, pool %d tokens in pages of %d",
            *(info.name, info.architecture, info.dtype, info.device, info.attention_backend),
            *(info.context_length, info.pool_tokens, info.page_size),
        )
        try:
            listener.listen(_BACKLOG)
        except OSError as error:  # another server took the port meanwhile
            raise CannotListen(config, error) from None
        host, port = listener.getsockname()[:2]
        gate = Gate()
        app = create_app(engine, config, tenants, gate)
        settings = uvicorn.Config(
            app,
            ws="none",
            log_level=options.log_level,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_ABORT_S,
            timeout_keep_alive=options.idle_timeout,
            proxy_headers=options.trusted_proxies is not None,
            forwarded_allow_ips=options.trusted_proxies,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
            server_header=False,
        )
        _load(settings)
        server = _Server(settings, engine, gate, app.state.feed, config)
        scheme = "https" if options.ssl_certfile else "http"
        log.info("serving on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
        died = asyncio.create_task(_stop_when_dead(engine, server))
        draining = asyncio.create_task(server.drain())
        await server.serve(sockets=[listener])
        draining.cancel()
        return EXIT_ENGINE_DIED if died.done() else EXIT_FORCED if server.force_exit else 0
    finally:
        await engine.stop()


def _load(settings: uvicorn.Config) -> None:
    try:
        settings.load()
    except (OSError, ValueError) as error:
        raise BadCertificate(f"--ssl-certfile and --ssl-keyfile cannot be used: {error}") from None


async def _stop_when_dead(engine: AsyncEngine, server: uvicorn.Server) -> None:
    await engine.wait_dead()
    server.should_exit = True
