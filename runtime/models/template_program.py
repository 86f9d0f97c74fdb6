"""Renders chat templates: the program of the processes of `templates.py`, which need none of Ramet's other modules.

Templates come with models, and are not trusted. A sandbox keeps them from this process, whose memory and time are
limited, because no check of a template bounds both.
"""

import functools
import json
import os
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import IO, Any

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Timeout of a chat template in seconds. Thousands of messages take milliseconds.
TEMPLATE_S = 5
# Bytes of memory, and most characters of a prompt.
_MEMORY, _MOST = 1 << 30, 1 << 26
# CPU seconds from one look at the memory to the next, where the system does not limit it.
_LOOK_S = 0.02
# The first byte of an answer; the others are the prompt or an error's message.
TEXT, REFUSED, UNREADABLE = b"t", b"r", b"u"


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's text for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """The `tojson` filter without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _answer(template: str, values: dict[str, Any] | None) -> tuple[bytes, str]:
    """The kind of an answer, and its text; `values`: None only reads the template."""
    kind = UNREADABLE
    try:
        compiled, kind = _compiled(template), REFUSED
        text = "" if values is None else compiled.render(values)
    except MemoryError:
        return kind, "it takes more memory than it may"
    except Exception as error:  # a template is a program and may raise anything
        return kind, str(error)
    return (TEXT, text) if len(text) <= _MOST else (REFUSED, f"the prompt has more than {_MOST} characters")


def read_frame(file: IO[bytes]) -> bytes:
    """A message, behind its length; empty at the file's end, also within a message: its writer was killed."""
    if len(size := file.read(4)) < 4:
        return b""
    (length,) = struct.unpack("<I", size)
    data = file.read(length)
    return data if len(data) == length else b""


def write_frame(file: IO[bytes], data: bytes) -> None:
    """Write a message."""
    file.write(struct.pack("<I", len(data)))
    file.write(data)
    file.flush()


def _limit_memory() -> None:
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    except (OSError, ValueError):
        # macOS has no such limit. Python looks at the memory between two operations; the time limits the longest one.
        signal.signal(signal.SIGPROF, _end_if_large)
        signal.setitimer(signal.ITIMER_PROF, _LOOK_S, _LOOK_S)


def _end_if_large(*_: object) -> None:
    unit = 1 if sys.platform == "darwin" else 1024
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit > _MEMORY:
        os._exit(1)


def main() -> None:
    """Answer the requests on standard input, until it ends. A request that lasts too long ends the process."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    _limit_memory()
    write_frame(sys.stdout.buffer, TEXT)
    while request := read_frame(sys.stdin.buffer):
        signal.alarm(2 * TEMPLATE_S)  # who asked may be gone
        kind, text = _answer(*msgspec.json.decode(request))
        signal.alarm(0)
        write_frame(sys.stdout.buffer, kind + text.encode("utf-8", "surrogatepass"))


if __name__ == "__main__":
    main()
