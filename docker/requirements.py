"""Prints the dependencies of the distribution and of the named extras, or of one of the groups below.

With --pinned: their lines of constraints.txt (versions and hashes), indirect dependencies included.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PYPROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
# Requirements of images that are no extras: tools that build the wheel, and the router.
GROUPS = {"build": PYPROJECT["build-system"]["requires"], "router": ["sglang-router==0.3.2"]}


def extra(name: str) -> Iterator[str]:
    """The requirements of an extra, and of the extras that it includes as `ramet[bench,otel]`."""
    for requirement in PROJECT["optional-dependencies"][name]:
        if others := re.fullmatch(rf"{PROJECT['name']}\[(.+)\]", requirement):
            for other in others[1].split(","):
                yield from extra(other)
        else:
            yield requirement


def pinned(requirements: list[str]) -> Iterator[str]:
    """The pins of requirements and of their dependencies. Comments below a pin name the packages that need it."""
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}
    text = Path(__file__).with_name("constraints.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([a-z0-9-]+)(==.*\n(?: .*\n)+)", text, re.MULTILINE))
    needed_by = {name: set(re.findall(r"^ +#(?: via)? +(\S+)$", pin, re.MULTILINE)) for name, pin in pins.items()}
    while found := {name for name in pins.keys() - names if needed_by[name] & names}:
        names |= found
    return (name + pin.rstrip() for name, pin in pins.items() if name in names)


asked = [name for name in sys.argv[1:] if name != "--pinned"]
if asked and asked[0] in GROUPS:
    found = GROUPS[asked[0]]
else:
    found = [*PROJECT["dependencies"], *(line for name in asked for line in extra(name))]
print(*(pinned(found) if "--pinned" in sys.argv else found), sep="\n")
