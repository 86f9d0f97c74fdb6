"""API keys, their permissions, and the cache namespace of each.

The file `--api-keys` and the environment variable RAMET_API_KEYS (lines separated by `;`) have one key a line:
`NAME KEY [admin] [public] [scope=public] [quota=PAGES] [max_priority=NUMBER]`, or `NAME KEY metrics` for a
scraper. Without keys the
server is open, and all requests belong to one tenant. A line `* SECRET` is the secret of
tenants' ids that several servers share.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.types import Scope

from radix import Namespace
from runtime.errors import InvalidRequest
from server.auth.secret import LEAST_CHARACTERS, installation_secret
from server.errors import BadKeys, Forbidden, Unauthorized
from server.json_requests import JsonRoute

ENVIRONMENT = "RAMET_API_KEYS"
# Routes without a key: health probes, and static pages that load their data from routes with a key.
OPEN_PATHS = frozenset({"/health", "/v1/health", "/ping", "/ready", "/", "/dashboard", "/docs"})
# The one route for scrapers' keys.
METRICS_PATH = "/metrics"
# The tenant of public pages. No account has this name.
PUBLIC = "public"

CacheScope = Annotated[
    Literal["private", "public"],
    Field(description="public: share cached pages with the other keys marked public; default: the key's own scope"),
]
_COMMENT = re.compile(r"(^|\s)#.*")  # a key may contain #
_LINE = re.compile(
    r"(?P<name>[\w.-]{1,64})\s+(?P<key>\S{8,512})"
    r"(?P<flags>\s+metrics|(\s+(admin|public|scope=public|quota=[1-9]\d{0,8}|max_priority=\d{1,9}))*)"
)
_SECRET = re.compile(rf"\*\s+(?P<secret>\S{{{LEAST_CHARACTERS},512}})")


@dataclass(frozen=True, slots=True)
class Tenant:
    """The holder of an API key.

    Attributes:
        name: the operator's name for the key; empty on an open server.
        digest: SHA-256 of the key; the key itself is not stored.
        admin: whether the routes of server/admin are allowed.
        public: whether the key may share public prefixes.
        quota: most cached pages; None: `--tenant-quota`.
        max_priority: highest priority of its requests; admins have no limit.
        metrics: whether only `/metrics` is allowed.
        account: the tenant of its private cache namespaces.
        scope: the cache scope of requests that name none.
    """

    name: str
    digest: bytes
    admin: bool = False
    public: bool = False
    quota: int | None = None
    max_priority: int = 0
    metrics: bool = False
    account: str = ""
    scope: Literal["private", "public"] = "private"

    def namespace(self, salt: str | None, scope: str | None) -> Namespace:
        """The cache namespace of a request. Raises Forbidden for a public scope that the key may not use."""
        if (scope or self.scope) == "public":
            if not self.public:
                raise Forbidden("this key may not use public prefixes", param="cache_scope")
            return Namespace(PUBLIC, salt or "")
        return Namespace(self.account, salt or "")

    def priority(self, asked: int) -> int:
        """The priority of a request. Raises Forbidden above `max_priority`."""
        if asked > self.max_priority and not self.admin:
            raise Forbidden(f"this key may ask for priorities up to {self.max_priority}", param="priority")
        return asked


EVERYONE = Tenant("", b"", admin=True, public=True)
# Clients of a server without keys that others reach, unless it has --open-admin.
ANYONE = Tenant("", b"", public=True, max_priority=(1 << 31) - 1)


def _lines(path: Path | None, environment: str) -> Iterator[tuple[str, int, str]]:
    """Sources, numbers and lines without comments of the environment and the key file. Raises BadKeys."""
    given = [(ENVIRONMENT, number, line) for number, line in enumerate(environment.split(";"), 1)]
    if path is not None:
        try:
            given += [(f"{path}", number, line) for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)]
        except (OSError, UnicodeDecodeError) as error:
            raise BadKeys(
                f"--api-keys {path} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}"
            ) from None
    for source, number, line in given:
        if line := _COMMENT.sub("", line).strip():
            yield source, number, line


def read_keys(path: Path | None, environment: str | None = None) -> list[Tenant]:
    """The tenants of the key file, and of `environment`, or else of the variable. Raises BadKeys."""
    environment = os.environ.get(ENVIRONMENT, "") if environment is None else environment
    tenants: list[Tenant] = []
    secret = None
    for source, number, line in _lines(path, environment):
        if (shared := _SECRET.fullmatch(line)) is not None:
            secret = shared["secret"].encode()
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise BadKeys(
                f"line {number} of {source} is neither `NAME KEY [admin] [public] [scope=public] [quota=PAGES] "
                "[max_priority=NUMBER]` nor `NAME KEY metrics`; a key has 8 to 512 characters, the first one no #"
            )
        flags = {name: value for name, _, value in (flag.partition("=") for flag in found["flags"].split())}
        digest = hashlib.sha256(found["key"].encode()).digest()
        if any(tenant.digest == digest or tenant.name == found["name"] for tenant in tenants):
            raise BadKeys(f"line {number} of {source} repeats a name or a key")
        tenants.append(
            Tenant(
                found["name"],
                digest,
                admin="admin" in flags,
                public="public" in flags or "scope" in flags,
                scope="public" if "scope" in flags else "private",
                quota=int(flags["quota"]) if "quota" in flags else None,
                max_priority=int(flags.get("max_priority", 0)),
                metrics="metrics" in flags,
            )
        )
    if path is not None and not tenants:
        raise BadKeys(f"--api-keys {path} has no key")  # else the server would be open by mistake
    if tenants and secret is None:
        secret = installation_secret()
    # Others see ids, in events and blocks: without the secret, weak keys could be guessed from them.
    return [replace(each, account=hmac.digest(secret or b"", each.digest, "sha256").hex()[:32]) for each in tenants]


class EveryKey(APIRouter):
    """A router whose routes accept every key. Routes of a plain APIRouter need an admin's key."""

    def __init__(self, **options: Any):
        super().__init__(route_class=JsonRoute, **options)


class Guard:
    """Checks API keys. OPEN_PATHS need no key, routes of an `EveryKey` any key, others an admin's key.

    Args:
        tenants: empty: nobody has a key, and all clients are `anyone`.
    """

    def __init__(self, tenants: list[Tenant], routers: Sequence[APIRouter], anyone: Tenant = EVERYONE):
        self.tenants, self.anyone = tenants, anyone
        self._own, self._closed = (
            [route for router in routers if isinstance(router, EveryKey) is own for route in routes_of(router)]
            for own in (True, False)
        )

    def check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Put the request's tenant into its state. Raises Unauthorized, Forbidden or InvalidRequest."""
        scope["state"]["tenant"] = self._authenticate(scope)

    def is_route(self, path: str) -> bool:
        return any(route.path_regex.match(path) for route in (*self._own, *self._closed))

    def _authenticate(self, scope: Scope) -> Tenant:
        if scope["path"] in OPEN_PATHS:
            return EVERYONE
        tenant = self._find(scope["headers"]) if self.tenants else self.anyone
        path = scope["path"]
        if tenant.metrics:
            if path != METRICS_PATH:
                raise Forbidden(f"this key is for {METRICS_PATH} alone")
            return tenant
        if not tenant.admin and self._is_closed(path, scope.get("method", "GET")):
            needed = "" if self.tenants else "; this server has none, and serves other machines without --open-admin"
            raise Forbidden(f"this route is for admin keys{needed}")
        return tenant

    def _is_closed(self, path: str, method: str) -> bool:
        if not any(route.path_regex.match(path) for route in self._closed):
            return False
        wanted = "GET" if method == "HEAD" else method
        return not any(wanted in (route.methods or ()) and route.path_regex.match(path) for route in self._own)

    def _find(self, sent: list[tuple[bytes, bytes]]) -> Tenant:
        headers = dict(sent)
        for name in (b"authorization", b"x-api-key"):
            if sum(sent_name == name for sent_name, _ in sent) > 1:
                raise InvalidRequest(f"the header {name.decode()} may be sent once")
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(key.strip()).digest()
        # All keys are compared, each in constant time, so that the duration reveals nothing.
        found = [tenant for tenant in self.tenants if hmac.compare_digest(tenant.digest, digest)]
        if not found:
            raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")
        return found[0]


def routes_of(router: APIRouter) -> list[APIRoute]:
    return [route for route in router.routes if isinstance(route, APIRoute)]


def get_tenant(request: Request) -> Tenant:
    return request.state.tenant


CurrentTenant = Annotated[Tenant, Depends(get_tenant)]
