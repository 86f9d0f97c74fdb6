"""Cross-site requests, which browsers send even to servers on their own machine or network."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from server.auth.keys import Forbidden
from server.http.refusal import Refusal

_FOREIGN = (b"cross-site", b"same-site")


class Origins:
    """ASGI middleware: refuses requests that a browser sends for a page of another origin (403).

    A plain POST, and any GET, is sent without a preflight; the browser only withholds the response from the page. On a
    server without keys that is enough to stop it, or to make it compute. Navigation to the server is not refused.

    Args:
        allowed: the origins of `--cors-origins`; `*` allows all.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str], refuse: Refusal):
        self.app = app
        self.allowed = frozenset(origin.strip().encode() for origin in allowed)
        self.refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or run the application."""
        if scope["type"] == "http" and self._is_foreign(scope):
            error = Forbidden("pages of this origin may not send requests; --cors-origins lists those that may")
            await self.refuse(error, scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_foreign(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        if headers.get(b"sec-fetch-site") not in _FOREIGN or b"*" in self.allowed:
            return False
        follows_link = scope["method"] == "GET" and headers.get(b"sec-fetch-mode") == b"navigate"
        return not follows_link and headers.get(b"origin") not in self.allowed
