"""`ramet serve`: one engine, one HTTP server, one exit code."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys

import uvicorn

from runtime.client import AsyncEngine
from runtime.config import Config
from runtime.errors import RametError
from server.app import create_app
from server.auth import Tenant, read_keys
from server.dashboard import Feed

log = logging.getLogger("ramet.server")

EXIT_ENGINE_DIED = 70

# How long running requests may go on when the server stops; then they are aborted, which takes a moment.
_GRACE_S = 5
_ABORT_S = 3

_BACKLOG = 2048


class CannotListen(RametError):
    """The address is taken, or is none of this machine."""

    def __init__(self, config: Config, error: OSError):
        super().__init__(f"cannot listen on {config.server.host}:{config.server.port}: {error.strerror}")


def serve(config: Config) -> int:
    """Serve until SIGTERM or SIGINT (returns 0) or the engine's death (70). Raises RametError if it cannot start."""
    logging.basicConfig(level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    tenants = read_keys(config.server.api_keys)
    with _bind(config) as listener:
        return asyncio.run(_serve(config, listener, tenants))


def _bind(config: Config) -> socket.socket:
    """Take the port before the model is loaded, so that a port in use is known at once."""
    family = socket.AF_INET6 if ":" in config.server.host else socket.AF_INET
    # With the protocol left out, asyncio would not turn Nagle's algorithm off, and every small write would wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.server.host, config.server.port))
    except OSError as error:
        listener.close()
        raise CannotListen(config, error) from None
    return listener


class _Server(uvicorn.Server):
    """Lets running requests go on for a while when it stops, and ends the others properly."""

    def __init__(self, settings: uvicorn.Config, engine: AsyncEngine, feed: Feed):
        super().__init__(settings)
        self.engine = engine
        self.feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.feed.close()
        late = asyncio.get_running_loop().call_later(_GRACE_S, self._abort)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    def _abort(self) -> None:
        if self.engine.alive:
            self.engine.abort(None)


async def _serve(config: Config, listener: socket.socket, tenants: list[Tenant]) -> int:
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
        except OSError as error:  # another server that was loading at the same time was faster
            raise CannotListen(config, error) from None
        host, port = listener.getsockname()[:2]
        app = create_app(engine, config, tenants)
        settings = uvicorn.Config(
            app,
            log_level=config.server.log_level,
            log_config=None,
            timeout_graceful_shutdown=_GRACE_S + _ABORT_S,
            server_header=False,
            backlog=_BACKLOG,
        )
        server = _Server(settings, engine, app.state.feed)
        log.info("serving on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        died = asyncio.create_task(_stop_when_dead(engine, server))
        await server.serve(sockets=[listener])
        return EXIT_ENGINE_DIED if died.done() else 0
    finally:
        await engine.stop()


async def _stop_when_dead(engine: AsyncEngine, server: uvicorn.Server) -> None:
    await engine.wait_dead()
    server.should_exit = True
