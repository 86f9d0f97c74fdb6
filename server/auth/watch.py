"""Reads the key file again when it changes."""

import asyncio
import logging
import os
from pathlib import Path

from server.auth.keys import Tenant, read_keys
from server.errors import BadKeys

log = logging.getLogger("ramet.server")

_EVERY_S = 5.0


async def watch_keys(path: Path, tenants: list[Tenant], every_s: float = _EVERY_S) -> None:
    """Replace the contents of `tenants` whenever the file changes. A file that cannot be read changes nothing."""
    seen = None  # it may have changed since the start
    while True:
        await asyncio.sleep(every_s)
        if (state := _state(path)) == seen:
            continue
        seen = state
        try:
            found = await asyncio.to_thread(read_keys, path)
        except BadKeys as error:
            log.warning("the keys stay as they were: %s", error.message)
            continue
        if found != tenants:
            tenants[:] = found
            log.info("%s has changed: %d keys now", path, len(tenants))


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
