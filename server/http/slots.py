"""Limits on connections: over a limit, connections without a request (silent ones) are closed for new ones.

Requests may not hold all connections of a limit: a reserve stays. Beyond it they get 503, and their connections count
as silent. So a full limit always has a silent connection to close, and probes are always answered.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

from runtime.config import SchedulerConfig
from runtime.errors import RametError

# Descriptors for other uses: files, the engine's sockets and pipes.
_OTHERS = 128
_FEWEST = 16
_MOST_RESERVED = 64


class TooFewDescriptors(RametError):
    """The limit on open files leaves too few connections."""


def most_connections(config: SchedulerConfig) -> int:
    """Two connections for each open request, as far as descriptors go; raises the soft limit.

    Raises:
        TooFewDescriptors: if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(2 * config.max_open, _FEWEST) + _OTHERS
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if limit < (least := _FEWEST + _OTHERS):
        raise TooFewDescriptors(f"{_FEWEST} connections need {least} descriptors, but `ulimit -Hn` is {hard}")
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit - _OTHERS


class Limit:
    """A group of at most `most` connections."""

    def __init__(self, most: int):
        self.most = most
        self.most_busy = most - max(min(most // 8, _MOST_RESERVED), 1)
        self.busy = 0
        self.silent: dict[Slot, None] = {}  # the oldest first

    @property
    def taken(self) -> int:
        """Open connections."""
        return self.busy + len(self.silent)

    @property
    def full(self) -> bool:
        return self.taken >= self.most

    def shed(self) -> bool:
        """Close the oldest silent connection; False if there is none."""
        slot = next(iter(self.silent), None)
        if slot is not None:
            slot.leave()
            slot.close()
        return slot is not None


class Slot:
    """A connection's share of its limits: silent, or busy with a request.

    Attributes:
        close: closes the connection at once.
    """

    def __init__(self, *limits: Limit):
        self.close: Callable[[], object] = lambda: None
        self._limits = limits
        self._busy = False
        self._enter()

    @property
    def num_connections(self) -> int:
        """Open connections of the last limit, the widest."""
        return self._limits[-1].taken if self._limits else 0

    def _enter(self) -> None:
        for limit in self._limits:
            limit.silent[self] = None

    def _exit(self) -> None:
        for limit in self._limits:
            limit.silent.pop(self, None)
            limit.busy -= self._busy
        self._busy = False

    def take(self) -> bool:
        """Begin a request; False if requests hold as many connections as they may."""
        if not self._busy and all(limit.busy < limit.most_busy for limit in self._limits):
            self._exit()
            self._busy = True
            for limit in self._limits:
                limit.busy += 1
        return self._busy

    def rest(self) -> None:
        """End a request: the connection is now the latest silent one."""
        self._exit()
        self._enter()

    def leave(self) -> None:
        """End the connection; calling it again has no effect."""
        self._exit()
        self._limits = ()
