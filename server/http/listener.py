"""The listening socket, which bounds connections in all and per address."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable
from weakref import WeakValueDictionary

from uvicorn.middleware.proxy_headers import _TrustedHosts

from server.http.slots import Limit, Slot

log = logging.getLogger("ramet.server")

# Seconds without accepting when there is no descriptor for a connection, and between two lines about that.
PAUSE_S = 1.0
_QUIET_S = 60.0


class Listener:
    """Accepts connections; over a limit, the oldest silent one is closed.

    Args:
        listening: the socket, non-blocking.
        connect: makes the protocol of a connection.
        most: connections; one address may have half of them, unless it is a trusted proxy.
        proxies: `--trusted-proxies`.
        tls: for HTTPS.
        patience_s: seconds for the handshake of TLS.
    """

    def __init__(
        self,
        listening: socket.socket,
        connect: Callable[[Slot], asyncio.Protocol],
        most: int,
        proxies: str | None = None,
        tls: ssl.SSLContext | None = None,
        patience_s: float = 30.0,
    ):
        self._socket = listening
        self._connect = connect
        self._all_clients = Limit(most)
        self._addresses: WeakValueDictionary[str, Limit] = WeakValueDictionary()
        self._proxies = _TrustedHosts(proxies or "")
        self._tls = tls
        self._handshake_s = None if tls is None else patience_s
        self._opening: set[asyncio.Task[None]] = set()
        self._told_s = float("-inf")

    async def accept(self) -> None:
        """Accept until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            pause_s = 0.0  # in which a closed connection gives its descriptor back
            try:
                connection, address = await loop.sock_accept(self._socket)
                self._take_slot(connection, address[0])
            except ConnectionAbortedError:
                pass
            except Exception as error:  # such as EMFILE; the server must go on accepting
                self._tell(f"a connection cannot be accepted: {error}")
                pause_s = 0.0 if self._all_clients.shed() else PAUSE_S
            await asyncio.sleep(pause_s)

    def _take_slot(self, connection: socket.socket, address: str) -> None:
        own = () if address in self._proxies else (self._limit_of(address),)
        for limit in (*own, self._all_clients):
            if limit.full:
                whose = "all clients have" if limit is self._all_clients else f"{address} has"
                self._tell(f"{whose} {limit.most} connections, the most: silent ones are closed for new ones")
                limit.shed()
        slot = Slot(*own, self._all_clients)
        task = asyncio.get_running_loop().create_task(self._open(connection, slot))
        slot.close = task.cancel
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _limit_of(self, address: str) -> Limit:
        name = _address_group(address)
        if (limit := self._addresses.get(name)) is None:
            limit = self._addresses[name] = Limit(max(self._all_clients.most // 2, 2))
        return limit

    async def _open(self, connection: socket.socket, slot: Slot) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: self._connect(slot), connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_s
            )
            slot.close = transport.abort
        except BaseException as error:
            slot.leave()
            if not isinstance(error, OSError):  # a handshake that fails
                raise

    def _tell(self, trouble: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._told_s >= _QUIET_S:
            self._told_s = now_s
            log.warning("%s", trouble)


def _address_group(address: str) -> str:
    """The address, or the network of an IPv6 address, within which a host may choose its own."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address) or found.ipv4_mapped is not None:
        return address
    return str(ipaddress.ip_network((int(found), 64), strict=False))
