"""Refuses requests that browsers send for foreign web pages, which can reach servers in the browser's network."""

import ipaddress
import re
import socket
from collections.abc import Collection

from starlette.types import Scope

from server.auth.keys import OPEN_PATHS
from server.errors import Forbidden

_FOREIGN = (b"cross-site", b"same-site")
# Origins of desktop applications and of a browser's extensions.
APPS = r"(?:app|tauri|capacitor|ionic|electron|vscode-webview|(?:chrome|moz|safari-web)-extension)://[A-Za-z0-9_.-]*"
_APP = re.compile(APPS.encode())
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::\d*)?")
# Top-level domains that public name servers do not have.
_PRIVATE = (".local", ".internal")


class Origins:
    """Refuses requests that a browser sends for a page of another origin (403). Navigation is allowed.

    Browsers send GET and simple POST requests without a preflight and only hide the response from the page. On a
    server without keys, such a request can stop the server or make it compute. Browsers send `Sec-Fetch-Site` only to
    localhost and over HTTPS, and `Origin` with every POST.

    Args:
        allowed: the origins of `--cors-origins`; `*` allows all.
        own_machine: whether the server is bound to this machine alone. Then `APPS` are allowed, too: they have been
            installed on it, and no page of the web has such an origin.
    """

    def __init__(self, allowed: Collection[str], own_machine: bool = False):
        self.allowed = frozenset(origin.encode() for origin in allowed)
        self._own_machine = own_machine

    def allows(self, origin: bytes | None) -> bool:
        """Whether pages of this origin may send requests, although it is not the server's own."""
        is_app = self._own_machine and origin is not None and _APP.fullmatch(origin) is not None
        return b"*" in self.allowed or origin in self.allowed or is_app

    def check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raise Forbidden for a request from a foreign page."""
        origin = headers.get(b"origin")
        if self.allows(origin):
            return
        follows_link = scope["method"] == "GET" and headers.get(b"sec-fetch-mode") == b"navigate"
        crosses = headers.get(b"sec-fetch-site") in _FOREIGN and not follows_link
        # Schemes are not compared, because a proxy may terminate TLS.
        own = headers.get(b"host", b"").lower()
        if crosses or (origin is not None and origin.lower().partition(b"://")[2] != own):
            raise Forbidden("pages of this origin may not send requests; --cors-origins allows more origins")


class Hosts:
    """Refuses requests whose Host may be an attacker's name (403). For servers without keys.

    In DNS rebinding, the attacker's name first resolves to the attacker's server and then to this one, so that the
    browser takes the attacker's page for one of this server. A key or a certificate prevents that.

    Args:
        bound: the address or name that the server is bound to. Unless it is this machine's own (loopback), private
            names are allowed as well: only attackers within the network can forge them, and they need no page.
            A client may name the address to which it has connected.
        allowed: the names of `--allowed-hosts`; `*` allows all.

    Attributes:
        own_machine: whether the server is bound to this machine alone.
    """

    def __init__(self, bound: str, allowed: Collection[str]):
        self.names = {name.lower().strip("[]") for name in (*allowed, bound, "localhost", socket.gethostname())}
        address = _address(bound)
        self.own_machine = bound == "localhost" or (address is not None and address.is_loopback)
        self._with_loopback = self.own_machine or (address is not None and address.is_unspecified)

    def check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raise Forbidden for a Host that is not this server's."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not host or scope["scheme"] == "https" or scope["path"] in OPEN_PATHS or "*" in self.names:
            return
        found = _HOST.fullmatch(host)
        if found is None or not self._is_own(found[1].strip("[]").removesuffix("."), scope):
            raise Forbidden("this server does not accept this host name; --allowed-hosts adds names")

    def _is_own(self, name: str, scope: Scope) -> bool:
        if name in self.names or name.endswith(".localhost"):
            return True
        if (address := _address(name)) is not None:
            local, _ = scope.get("server") or ("", None)
            return (self._with_loopback and address.is_loopback) or address == _address(local)
        return not self.own_machine and ("." not in name or name.endswith(_PRIVATE))


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a name is, without an interface; None for other names."""
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
