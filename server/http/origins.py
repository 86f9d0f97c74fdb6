"""Pages of other sites, which a browser lets send requests to a server on its machine whatever that server says."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from server.auth.keys import Forbidden
from server.http.refusal import Refusal

_FOREIGN = (b"cross-site", b"same-site")


class Origins:
    """ASGI middleware: refuses what a browser sends for a page of another origin, unless that one is allowed (403).

    A plain POST, and any GET, is sent without a question before it; only the answer would be kept from the page. On a
    server without keys that is enough to stop it, or to let it compute. Following a link is not refused.

    Args:
        app: the application.
        allowed: the origins of `--cors-origins`, of which `*` stands for all.
        refuse: answers.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str], refuse: Refusal):
        self.app = app
        self.allowed = frozenset(origin.strip().encode() for origin in allowed)
        self.refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for everybody else."""
        if scope["type"] == "http" and self._is_foreign(scope):
            error = Forbidden("a page of another origin may not ask here; --cors-origins names those that may")
            await self.refuse(error, scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_foreign(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        if headers.get(b"sec-fetch-site") not in _FOREIGN or b"*" in self.allowed:
            return False
        follows_link = scope["method"] == "GET" and headers.get(b"sec-fetch-mode") == b"navigate"
        return not follows_link and headers.get(b"origin") not in self.allowed
