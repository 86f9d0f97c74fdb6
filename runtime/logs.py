"""Logs of both processes, as text or JSON lines, with the id of the HTTP request."""

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]

# Id of the current HTTP request; empty outside of requests.
request_id: ContextVar[str] = ContextVar("request_id", default="")

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TEXT_OF_REQUEST = "%(asctime)s %(levelname)s %(name)s [%(request_id)s]: %(message)s"


def set_up_logs(level: str, form: LogFormat) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def one_line(text: str) -> str:
    """A text with line breaks, control characters and lone surrogates escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _OneLine(logging.Formatter):
    """A formatter that keeps messages, which may quote clients, from forging other lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message)
        return super().formatMessage(record)


class _TextFormatter(_OneLine):
    def __init__(self) -> None:
        super().__init__(_TEXT)
        self._of_request = _OneLine(_TEXT_OF_REQUEST)

    def format(self, record: logging.LogRecord) -> str:
        if not (found := request_id.get()):
            return super().format(record)
        record.request_id = found
        return self._of_request.format(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if found := request_id.get():
            line["request_id"] = found
        # Fields of the call's `extra`, such as a request's status and duration.
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace").decode()
