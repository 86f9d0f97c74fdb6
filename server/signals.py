"""Signals to the server's process, or to its group."""

import asyncio
import logging
import signal
import time

from server.http.shutdown import ShutdownFlag

log = logging.getLogger("ramet.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

# `timeout` signals the process and then its group: signals within this time count as one.
_ECHO_S = 0.5


class Signals:
    """Requests shutdown on TERM, INT and HUP; ends the server at once on a second TERM or INT, and on QUIT.

    A HUP never counts as a second signal: where a terminal closes, its shell repeats the kernel's, and systemd may send
    it behind a TERM. Signals that were ignored at the start (`nohup`, `command &` in a script) stay ignored.

    Attributes:
        forced: set once the server must end at once; shutdown is requested then, too.
    """

    def __init__(self, shutdown: ShutdownFlag):
        """Take the signals from now on. Runs in the event loop of the main thread."""
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
