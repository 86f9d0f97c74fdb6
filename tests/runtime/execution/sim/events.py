"""What the simulated device sees, with the line of the product that caused it."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

_ROOT = Path(__file__).parents[4]
_ROOMS = tuple(f"{_ROOT / room}/" for room in ("runtime", "server", "loadgen"))

# What a steady step may not do: wait for the device without having asked for it, copy from or to pageable memory, and
# reserve more memory.
STALLS = frozenset({"sync", "pageable", "reserve"})


@dataclass(frozen=True)
class Event:
    """One thing that a step did.

    Attributes:
        kind: `sync` (the host waits for the device), `pageable` (a copy from memory that is not pinned), `reserve` (the
            device's memory grows), `wait` (for an event that the product has set), `upload` and `download` (pinned
            copies that wait for nothing), `pin` (memory is pinned), `launch` (a graph).
        what: the operation.
        place: innermost line of the product, as `runtime/x.py:12 function`.
        stream: number of the stream; 0 is the one that computes.
    """

    kind: str
    what: str
    place: str
    stream: int


@dataclass
class Events:
    """Events of a time."""

    seen: list[Event] = field(default_factory=list)

    def count(self, *kinds: str) -> int:
        return sum(event.kind in kinds for event in self.seen)

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.seen if event.kind in kinds]

    def stalls_by_file(self) -> dict[str, int]:
        """Number of stalls by the product's file."""
        return dict(Counter(event.place.partition(":")[0] for event in self.of(*STALLS)))

    @property
    def stalls(self) -> list[str]:
        """What holds up a step, each line once, with its number."""
        found = Counter((event.kind, event.what, event.place) for event in self.of(*STALLS))
        return [f"{count} x {kind}: {what} at {place}" for (kind, what, place), count in found.items()]


class Recorder:
    """Hands events to all watches that are open."""

    def __init__(self) -> None:
        self._watches: list[Events] = []

    @contextmanager
    def watch(self) -> Iterator[Events]:
        events = Events()
        self._watches.append(events)
        try:
            yield events
        finally:
            self._watches = [one for one in self._watches if one is not events]

    def note(self, kind: str, what: str, stream: int = 0) -> None:
        if self._watches:
            event = Event(kind, what, place(sys._getframe(1)), stream)
            for events in self._watches:
                events.seen.append(event)


def place(frame: FrameType | None) -> str:
    """The innermost line of the product that `frame` runs for."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_ROOMS):
            return f"{Path(name).relative_to(_ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "a test"
