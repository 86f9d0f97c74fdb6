"""Fetches images from the hosts that the operator lists, and from no other."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Iterable
from functools import cache, partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import SplitResult, urljoin, urlsplit

from runtime.errors import InvalidRequest
from runtime.fair_threads import FairThreads

# Seconds for one image, its redirects included; bytes of all images of a request.
FETCH_S = 10.0
MOST_BYTES = 64 << 20
_THREADS, _REDIRECTS, _PIECE = 4, 3, 1 << 16
_PORTS = {"http": 80, "https": 443}
_WEB = re.compile("https?://", re.IGNORECASE)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ImageHosts:
    """The listed hosts. Fetching happens in threads of its own, where accounts take turns.

    Args:
        listed: see `--image-hosts`; None: nothing is fetched.
    """

    def __init__(self, listed: str | None):
        self._names, self._networks = set[str](), list[ipaddress.IPv4Network | ipaddress.IPv6Network]()
        for one in re.split(r"\s*,\s*", listed or ""):
            try:
                self._networks.append(ipaddress.ip_network(one, strict=False))
            except ValueError:
                self._names.add(one.lower())
        self._threads = FairThreads(_THREADS, "ramet-fetch") if listed else None

    async def fetch(self, account: str, urls: Iterable[str], param: str) -> dict[str, bytes]:
        """The images at those URLs that are of the web. Raises InvalidRequest if one cannot be fetched."""
        found, left = dict[str, bytes](), MOST_BYTES
        if (threads := self._threads) is None:
            return found
        for url in dict.fromkeys(urls):
            if not _WEB.match(url):
                continue
            try:
                async with asyncio.timeout(FETCH_S):  # also where the name of a host takes long
                    found[url] = await threads.run(account, partial(self._get, url, left))
            except (TimeoutError, OSError, HTTPException, ValueError) as error:
                late = isinstance(error, TimeoutError)
                why = f"takes longer than {FETCH_S:g} s" if late else f"fails ({type(error).__name__})"
                raise _refused(f"fetching an image {why}", param) from None
            except InvalidRequest as error:
                raise _refused(error.message, param) from None
            left -= len(found[url])
        return found

    def _get(self, url: str, most: int) -> bytes:
        """The body at a URL. Raises InvalidRequest, OSError, HTTPException and ValueError."""
        until_s, host = time.monotonic() + FETCH_S, None
        for _ in range(_REDIRECTS + 1):
            parts = urlsplit(url)
            if host not in (None, parts.hostname):
                raise InvalidRequest("the host of an image redirects to another")
            host = parts.hostname
            connection, sock = self._connect(parts, until_s)
            try:
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "ramet"})
                answer = connection.getresponse()
                if answer.status in (301, 302, 303, 307, 308):
                    url = urljoin(url, answer.headers["Location"] or "")
                elif answer.status == 200:
                    return _read(answer, sock, until_s, most)
                else:
                    raise InvalidRequest(f"the host of an image answers with status {answer.status}")
            finally:
                connection.close()
        raise InvalidRequest("the host of an image redirects too often")

    def _connect(self, parts: SplitResult, until_s: float) -> tuple[HTTPConnection, socket.socket]:
        """A connection to a listed host, at an address that may be used. Raises as `_get`."""
        host, scheme = parts.hostname or "", parts.scheme.lower()
        port = parts.port or _PORTS.get(scheme, 0)
        named = f"{host}:{port}" in self._names or (host in self._names and port == _PORTS.get(scheme))
        if scheme not in _PORTS or not (named or self._has(host)):
            raise InvalidRequest(f"images are fetched from the hosts that the operator lists; {host[:64]!r} is not one")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        address = next((place for *_, place in found if self._is_allowed(ipaddress.ip_address(place[0]), port)), None)
        if address is None:
            raise InvalidRequest("the host of an image has a private address, which the operator does not list")
        wait_s = max(until_s - time.monotonic(), 0.01)
        kind = HTTPSConnection if scheme == "https" else HTTPConnection
        connection = kind(host, port, timeout=wait_s)
        # The address that was checked is used: a second look-up of the name might find another.
        plain = socket.create_connection((str(address[0]), port), wait_s)
        if scheme == "https":
            plain = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
        connection.sock = plain  # the connection may forget it before the body is read
        return connection, plain

    def _has(self, host: str) -> bool:
        """Whether a host is a listed address."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def _is_allowed(self, address: Address, port: int) -> bool:
        plain = getattr(address, "ipv4_mapped", None) or address
        listed = f"{plain}:{port}" in self._names or any(plain in network for network in self._networks)
        return listed or (plain.is_global and not plain.is_multicast)


@cache
def hosts_of(listed: str | None) -> ImageHosts:
    """The listed hosts, which all routes share."""
    return ImageHosts(listed)


def _read(answer: HTTPResponse, sock: socket.socket, until_s: float, most: int) -> bytes:
    body = bytearray()
    while piece := answer.read1(_PIECE):
        body += piece
        if len(body) > most:
            raise InvalidRequest(f"the fetched images of a request have more than {MOST_BYTES} bytes")
        if (left_s := until_s - time.monotonic()) <= 0:
            raise TimeoutError
        if sock.fileno() >= 0:  # it is closed behind the last piece
            sock.settimeout(left_s)
    return bytes(body)


def _refused(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="invalid_image")
