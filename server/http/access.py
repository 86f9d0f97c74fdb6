"""Access log: an id and a line for every HTTP request, and a 500 for unexpected errors. Bodies are not logged."""

import logging
import re
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import RametError
from runtime.frontend.output import new_rid
from runtime.logs import one_line, request_id
from server.errors import error_response

log = logging.getLogger("ramet.access")

ID_HEADER = b"x-request-id"
# Anthropic's clients read `request-id`.
ID_HEADERS = (ID_HEADER, b"request-id")
# The status in the log if the client disconnected before the end of its response.
_GONE = 499
# Most characters of a path in the log.
_MOST_PATH = 256
# Clients and proxies may choose such request ids; other ids could forge log lines.
_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class AccessLog:
    """The outermost ASGI middleware. It gives each request an id and writes its line.

    Args:
        count: called for every request with its method, the route's path and the status.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str, str, int], None]):
        self.app = app
        self.count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application. An exception is logged, and answered with 500 if no response has begun."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        rid, started_s, status, has_ended = _rid_of(scope), time.monotonic(), 0, False
        request_id.set(rid)

        async def send_with_id(message: Message) -> None:
            nonlocal status, has_ended
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *((name, rid.encode()) for name in ID_HEADERS)]}
            await send(message)
            has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            has_ended = True
            log.exception("%s %s failed", scope["method"], _path(scope))
            if not status:
                response = error_response(RametError("an internal error occurred"), scope["path"])
                await response(scope, receive, send_with_id)
        finally:
            status = scope.get("state", {}).get("ended_with", status) if has_ended else _GONE
            self.count(scope["method"], getattr(scope.get("route"), "path", "none"), status)
            _write(scope, status, time.monotonic() - started_s)


def _rid_of(scope: Scope) -> str:
    given = dict(scope["headers"]).get(ID_HEADER, b"")
    return given.decode() if _ID.fullmatch(given) else new_rid()


def _path(scope: Scope) -> str:
    return one_line(scope["path"][:_MOST_PATH])


def _write(scope: Scope, status: int, seconds: float) -> None:
    client = (scope.get("client") or ("-",))[0]
    tenant = getattr(scope.get("state", {}).get("tenant"), "name", "")
    path = _path(scope)
    fields = {"method": scope["method"], "path": path, "status": status, "client": client, "key": tenant}
    log.info(
        "%s %s %d %.0f ms %s %s",
        scope["method"],
        path,
        status,
        1000 * seconds,
        client,
        tenant or "-",
        extra={"fields": {**fields, "duration_s": round(seconds, 6)}},
    )
