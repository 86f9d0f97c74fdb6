"""Accepts connections, with a limit on all of them and a limit per address."""

import asyncio
import ipaddress
import logging
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from functools import partial

from uvicorn.middleware.proxy_headers import _TrustedHosts

from runtime.config import SchedulerConfig
from runtime.errors import RametError

log = logging.getLogger("ramet.server")

# Seconds of pause after an error of `accept`, and between two log lines about refused connections.
PAUSE_S = 1.0
_QUIET_S = 60.0
# File descriptors reserved for other uses: files, the engine's sockets and pipes.
_OTHERS = 128
_FEWEST = 16
# Descriptors that macOS gives any process (its <sys/syslimits.h>).
_OPEN_MAX = 10_240


class TooFewDescriptors(RametError):
    """The limit on open files leaves too few connections."""


def most_connections(config: SchedulerConfig) -> int:
    """Two connections for each open request, or fewer if the hard limit on descriptors is low. Raises the soft limit.

    Raises:
        TooFewDescriptors: if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(2 * config.max_open, _FEWEST) + _OTHERS
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if limit < (least := _FEWEST + _OTHERS):
        raise TooFewDescriptors(f"{_FEWEST} connections need {least} descriptors, but `ulimit -Hn` is {hard}")
    if soft != resource.RLIM_INFINITY and soft < limit:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except ValueError:  # macOS names no hard limit, and refuses more than its own
            limit = max(soft, min(limit, _OPEN_MAX))
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit - _OTHERS


class Listener:
    """Accepts connections. Over a limit, new connections are closed at once.

    Args:
        listening: the non-blocking listening socket.
        connect: makes the protocol of a connection; its argument is a function to call when the connection ends.
        most: most connections; one address may have half of them, unless it is a trusted proxy.
        proxies: `--trusted-proxies`.
        tls: the context for HTTPS.
        patience_s: seconds for the TLS handshake.
    """

    def __init__(
        self,
        listening: socket.socket,
        connect: Callable[[Callable[[], None]], asyncio.Protocol],
        most: int,
        proxies: str | None = None,
        tls: ssl.SSLContext | None = None,
        patience_s: float = 30.0,
    ):
        self._socket = listening
        self._connect = connect
        self._most = most
        self._most_of_address = max(most // 2, 2)
        self._num_open = 0
        self._num_of_address = Counter[str]()
        self._proxies = _TrustedHosts(proxies or "")
        self._tls = tls
        self._handshake_s = None if tls is None else patience_s
        self._opening: set[asyncio.Task[None]] = set()
        self._told_s = float("-inf")

    async def accept(self) -> None:
        """Accept until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            pause_s = 0.0  # lets other tasks run between two connections
            try:
                connection, address = await loop.sock_accept(self._socket)
                self._take(connection, address[0])
            except ConnectionAbortedError:
                pass
            except Exception as error:  # for example EMFILE; the server must keep accepting
                self._tell(f"a connection cannot be accepted: {error}")
                pause_s = PAUSE_S
            await asyncio.sleep(pause_s)

    def _take(self, connection: socket.socket, address: str) -> None:
        group = "" if address in self._proxies else _address_group(address)
        if self._num_open >= self._most:
            self._refuse(connection, f"there are {self._most} connections")
        elif group and self._num_of_address[group] >= self._most_of_address:
            self._refuse(connection, f"{address} has {self._most_of_address} connections")
        else:
            self._count(group, 1)
            task = asyncio.get_running_loop().create_task(self._open(connection, group))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        self._tell(f"{reason}, which is the limit: new ones are closed")
        connection.close()

    def _count(self, group: str, change: int) -> None:
        self._num_open += change
        self._num_of_address[group] += change
        if not self._num_of_address[group]:
            del self._num_of_address[group]

    async def _open(self, connection: socket.socket, group: str) -> None:
        left = partial(self._count, group, -1)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connect(left), connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_s
            )
        except OSError:  # the TLS handshake failed
            left()

    def _tell(self, trouble: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._told_s >= _QUIET_S:
            self._told_s = now_s
            log.warning("%s", trouble)


def _address_group(address: str) -> str:
    """The IPv4 address, or the /64 network of an IPv6 address, in which a host may use any address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address) or found.ipv4_mapped is not None:
        return address
    return str(ipaddress.ip_network((int(found), 64), strict=False))
