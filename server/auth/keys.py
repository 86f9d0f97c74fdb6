"""Who asks: API keys, what each may do, and the cache namespace that follows from it.

A key is a line `NAME KEY [admin] [public] [quota=PAGES] [max_priority=NUMBER]`, or `NAME KEY metrics` for a scraper, of
the file `--api-keys`, or of the environment variable RAMET_API_KEYS (lines separated by `;`). Without any key the
server is open, and everyone is the same tenant.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import InvalidRequest, RametError
from server.http.refusal import Refusal

ENVIRONMENT = "RAMET_API_KEYS"
# Routers and orchestrators ask without a key whether to send requests here. The page itself is the same for everybody;
# what it shows wants a key.
OPEN_PATHS = frozenset({"/health", "/ready", "/", "/dashboard"})
# What a scraper's key is for.
METRICS_PATH = "/metrics"
# Routes in server/admin that every key may ask, each for its own part.
OWN_PATHS = frozenset({"/cache/tree"})

CacheScope = Annotated[
    Literal["private", "public"],
    Field(description="public: share cached pages with all keys that may; only for keys marked public"),
]
_LINE = re.compile(
    r"(?P<name>[\w.-]{1,64})\s+(?P<key>\S{8,512})"
    r"(?P<flags>\s+metrics|(\s+(admin|public|quota=[1-9]\d{0,8}|max_priority=\d{1,9}))*)"
)


class Unauthorized(RametError):
    """No key, or one that is not known (HTTP 401)."""

    status = 401
    type = "authentication_error"


class Forbidden(RametError):
    """A key that may not do this (HTTP 403)."""

    status = 403
    type = "permission_error"


class BadKeys(RametError):
    """The configured keys cannot be read. Never shows a key."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks.

    Attributes:
        name: as the operator calls the key; empty on an open server.
        digest: SHA-256 of the key, which itself is not kept.
        admin: whether the routes about cache and server are allowed.
        public: whether public prefixes are.
        quota: pages that it may keep cached; None: the configured number.
        max_priority: the highest priority that requests may ask for; admins may ask for any.
        metrics: whether `/metrics` is all that is allowed.
    """

    name: str
    digest: bytes
    admin: bool = False
    public: bool = False
    quota: int | None = None
    max_priority: int = 0
    metrics: bool = False

    @property
    def account(self) -> str:
        """What the engine calls the tenant: the part of all its namespaces before the slash."""
        return self.digest.hex()[:32]

    def namespace(self, salt: str | None, scope: str) -> str:
        """The cache namespace of a request. Raises Forbidden for a public scope that the key may not use."""
        if scope == "public":
            if not self.public:
                raise Forbidden("this key may not use public prefixes", param="cache_scope")
            return f"public/{salt or ''}"
        return f"{self.account}/{salt or ''}"

    def priority(self, asked: int) -> int:
        """The priority of a request that asks for one. Raises Forbidden for a higher one than the key may have."""
        if asked > self.max_priority and not self.admin:
            raise Forbidden(f"this key may ask for priorities up to {self.max_priority}", param="priority")
        return asked


_EVERYONE = Tenant("", b"", admin=True, public=True)


def read_keys(path: Path | None) -> list[Tenant]:
    """The tenants of the key file and of the environment. Raises BadKeys."""
    lines = os.environ.get(ENVIRONMENT, "").split(";")
    if path is not None:
        try:
            lines += path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadKeys(
                f"--api-keys {path} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}"
            ) from None
    tenants: list[Tenant] = []
    for number, line in enumerate(lines, start=1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise BadKeys(
                f"API key line {number} is neither `NAME KEY [admin] [public] [quota=PAGES] [max_priority=NUMBER]` "
                "nor `NAME KEY metrics`, the key with 8 characters or more"
            )
        flags = {name: value for name, _, value in (flag.partition("=") for flag in found["flags"].split())}
        digest = hashlib.sha256(found["key"].encode()).digest()
        if any(tenant.digest == digest or tenant.name == found["name"] for tenant in tenants):
            raise BadKeys(f"API key line {number} repeats a name or a key")
        tenants.append(
            Tenant(
                found["name"],
                digest,
                admin="admin" in flags,
                public="public" in flags,
                quota=int(flags["quota"]) if "quota" in flags else None,
                max_priority=int(flags.get("max_priority", 0)),
                metrics="metrics" in flags,
            )
        )
    if path is not None and not tenants:
        raise BadKeys(f"--api-keys {path} has no key")  # an open server is never what was meant
    return tenants


def admin_paths(routers: list[APIRouter]) -> tuple[str, ...]:
    """Beginnings of the paths of operators' routes: each path up to its first parameter."""
    paths = {route.path for router in routers for route in router.routes if isinstance(route, APIRoute)}
    return tuple({path.partition("{")[0] for path in paths - OPEN_PATHS - OWN_PATHS})


class Guard:
    """ASGI middleware: with keys, every route but `/health` and `/ready` wants one, and some want an admin's."""

    def __init__(self, app: ASGIApp, tenants: list[Tenant], admin_paths: tuple[str, ...], refuse: Refusal):
        self.app = app
        self.tenants = tenants
        self.admin_paths = admin_paths
        self.refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application as the tenant whose key the request has."""
        if scope["type"] == "http":
            try:
                scope.setdefault("state", {})["tenant"] = self._admit(scope)
            except RametError as error:
                await self.refuse(error, scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _admit(self, scope: Scope) -> Tenant:
        if not self.tenants or scope["path"] in OPEN_PATHS:
            return _EVERYONE
        tenant = self._find(scope["headers"])
        path = scope["path"]
        if tenant.metrics:
            if path != METRICS_PATH:
                raise Forbidden(f"this key is for {METRICS_PATH} alone")
            return tenant
        if path.startswith(self.admin_paths) and path not in OWN_PATHS and not tenant.admin:
            raise Forbidden("this route is for admin keys")
        return tenant

    def _find(self, sent: list[tuple[bytes, bytes]]) -> Tenant:
        headers = dict(sent)
        for name in (b"authorization", b"x-api-key"):
            if sum(sent_name == name for sent_name, _ in sent) > 1:
                raise InvalidRequest(f"the header {name.decode()} may be sent once")
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(key.strip()).digest()
        # All are compared, in constant time each: how long it takes tells nothing about any key.
        found = [tenant for tenant in self.tenants if hmac.compare_digest(tenant.digest, digest)]
        if not found:
            raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")
        return found[0]


def get_tenant(request: Request) -> Tenant:
    """The tenant whose key a request has."""
    return request.state.tenant


Asker = Annotated[Tenant, Depends(get_tenant)]
