"""Bounds on connections: where there are too many, those without a request make room for new ones.

Requests may hold a reserve less than all connections of a group; beyond that they are answered with 503, and their
connections count as silent. So a full group always has a silent connection to close, and probes are always answered.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

from runtime.config import Config
from runtime.errors import RametError

# Descriptors that are no client's: files, the engine's sockets and pipes.
_OTHERS = 128
_FEWEST = 16
_MOST_RESERVED = 64


class TooFewDescriptors(RametError):
    """The limit on open files leaves too few connections."""


def most_connections(config: Config) -> int:
    """`--max-connections`, by default two for each open request, as far as descriptors go; raises the soft limit.

    Raises:
        TooFewDescriptors: if the hard limit is too low.
    """
    asked = config.server.max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (asked or max(2 * config.scheduler.max_open, _FEWEST)) + _OTHERS
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    least = (asked or _FEWEST) + _OTHERS
    if limit < least:
        raise TooFewDescriptors(f"{least - _OTHERS} connections need {least} descriptors, but `ulimit -Hn` is {hard}")
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit - _OTHERS


class Room:
    """A group of at most `most` connections."""

    def __init__(self, most: int):
        self.most = most
        self.most_busy = most - max(min(most // 8, _MOST_RESERVED), 1)
        self.busy = 0
        self.silent: dict[Seat, None] = {}  # the oldest first

    @property
    def taken(self) -> int:
        """Open connections."""
        return self.busy + len(self.silent)

    @property
    def full(self) -> bool:
        return self.taken >= self.most

    def shed(self) -> bool:
        """Close the oldest silent connection; False if there is none."""
        seat = next(iter(self.silent), None)
        if seat is not None:
            seat.leave()
            seat.close()
        return seat is not None


class Seat:
    """A connection's place in its groups: silent, or busy with a request.

    Attributes:
        close: closes the connection at once.
    """

    def __init__(self, *rooms: Room):
        self.close: Callable[[], object] = lambda: None
        self._rooms = rooms
        self._busy = False
        self._enter()

    @property
    def num_connections(self) -> int:
        """Open connections of the widest group."""
        return self._rooms[-1].taken if self._rooms else 0

    def _enter(self) -> None:
        for room in self._rooms:
            room.silent[self] = None

    def _exit(self) -> None:
        for room in self._rooms:
            room.silent.pop(self, None)
            room.busy -= self._busy
        self._busy = False

    def take(self) -> bool:
        """A request begins; False if requests hold all that they may."""
        if not self._busy and all(room.busy < room.most_busy for room in self._rooms):
            self._exit()
            self._busy = True
            for room in self._rooms:
                room.busy += 1
        return self._busy

    def rest(self) -> None:
        """The request has ended: the connection is the youngest silent one."""
        self._exit()
        self._enter()

    def leave(self) -> None:
        """The connection has ended; may be called again."""
        self._exit()
        self._rooms = ()
