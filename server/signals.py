"""Handles signals to the server's process or its group."""

import asyncio
import logging
import signal
import time

from server.http.shutdown import ShutdownFlag

log = logging.getLogger("ramet.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

# Signals within this time count as one, because `timeout` signals the process and then its group.
_ECHO_S = 0.5


class Signals:
    """Requests shutdown on TERM, INT and HUP. Ends the server at once on a second TERM or INT, and on QUIT.

    HUP never counts as the second signal: when a terminal closes, both kernel and shell send it, and systemd may send
    it after TERM. Signals that were ignored at the start (`nohup`, `command &` in a script) stay ignored.

    Attributes:
        forced: set when the server must end at once; shutdown is then requested, too.
    """

    def __init__(self, shutdown: ShutdownFlag):
        """Install the handlers. Call it in the event loop of the main thread."""
        self.forced = asyncio.Event()
        self._shutdown = shutdown
        self._first_s: float | None = None
        for number in _SIGNALS:
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._take, number)

    def _take(self, number: signal.Signals) -> None:
        now = time.monotonic()
        again = self._first_s is not None and now - self._first_s > _ECHO_S and number != signal.SIGHUP
        if number == signal.SIGQUIT or again:
            log.warning("%s: running requests are lost", number.name)
            self.forced.set()
        elif self._first_s is None:
            self._first_s = now
        self._shutdown.set()
