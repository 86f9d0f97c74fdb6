"""Prints the dependencies of the distribution, and those of the extras that are named."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]


def extra(name: str) -> Iterator[str]:
    """The requirements of an extra, in which an extra may name others: `ramet[bench,otel]`."""
    for requirement in PROJECT["optional-dependencies"][name]:
        if others := re.fullmatch(rf"{PROJECT['name']}\[(.+)\]", requirement):
            for other in others[1].split(","):
                yield from extra(other)
        else:
            yield requirement


print(*PROJECT["dependencies"], *(line for name in sys.argv[1:] for line in extra(name)), sep="\n")
