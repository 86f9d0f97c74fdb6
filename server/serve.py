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
from runtime.errors import ModelError
from server.app import create_app

log = logging.getLogger("ramet.server")

EXIT_ENGINE_DIED = 70

# How long open connections may still send what they have when the server stops.
_GRACE_S = 5


def serve(config: Config) -> int:
    """Serve until SIGTERM or SIGINT (exit code 0) or the engine's death (70); 1 if it cannot start."""
    logging.basicConfig(level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    try:
        listener = _bind(config)
    except OSError as error:
        print(f"ramet: cannot bind {config.server.host}:{config.server.port}: {error.strerror}", file=sys.stderr)
        return 1
    with listener:
        try:
            return asyncio.run(_serve(config, listener))
        except ModelError as error:
            print(f"ramet: {error.message}", file=sys.stderr)
            return 1


def _bind(config: Config) -> socket.socket:
    """Take the port before the model is loaded, so that a port in use is known at once."""
    family = socket.AF_INET6 if ":" in config.server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.server.host, config.server.port))
    except OSError:
        listener.close()
        raise
    return listener


async def _serve(config: Config, listener: socket.socket) -> int:
    log.info("loading %s", config.model.model)
    engine = AsyncEngine(config)
    await engine.start()
    try:
        info = engine.info
        log.info(
            "%s (%s, %s on %s, %s attention): context %d tokens, pool %d tokens in pages of %d",
            *(info.name, info.architecture, info.dtype, info.device, info.attention_backend),
            *(info.context_length, info.pool_tokens, info.page_size),
        )
        host, port = listener.getsockname()[:2]
        settings = uvicorn.Config(
            create_app(engine, config),
            log_level=config.server.log_level,
            log_config=None,
            timeout_graceful_shutdown=_GRACE_S,
            server_header=False,
        )
        server = uvicorn.Server(settings)
        log.info("serving on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        died = asyncio.create_task(_stop_when_dead(engine, server))
        await server.serve(sockets=[listener])
        return EXIT_ENGINE_DIED if died.done() else 0
    finally:
        await engine.stop()


async def _stop_when_dead(engine: AsyncEngine, server: uvicorn.Server) -> None:
    await engine.wait_dead()
    server.should_exit = True
