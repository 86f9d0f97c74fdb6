"""Server-sent events from bytes that are cut anywhere."""

# Far above any event of a completion; a longer one would fill the memory.
MAX_EVENT_BYTES = 16 << 20


class EventSplitter:
    """Bytes to the `data` of complete events; knows LF and CRLF, comments, and several data lines in an event."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that `chunk` completes. Raises ValueError for an event beyond MAX_EVENT_BYTES."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def close(self) -> list[bytes]:
        """The last event, if no empty line has ended it."""
        events = self.feed(b"\n\n")
        self._rest, self._data = b"", []
        return events
