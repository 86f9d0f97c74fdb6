"""Prints the dependencies of the distribution and of the named extras, or of one of the groups below.

With --pinned: their lines of constraints.txt (versions and hashes), indirect dependencies included.
With --shorten LOCK: leaves in constraints.txt the hashes of those files of a pylock.toml that the images can install.
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
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
# Python 3.11 and 3.12 are in the base images that Dockerfile names.
MINORS = (11, 12)
PLATFORM = re.compile(r"any|(many)?linux.*_(x86_64|aarch64)")


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
    pins = dict(re.findall(r"^([a-z0-9-]+)(==.*\n(?: .*\n)+)", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE))
    needed_by = {name: set(re.findall(r"^ +#(?: via)? +(\S+)$", pin, re.MULTILINE)) for name, pin in pins.items()}
    while found := {name for name in pins.keys() - names if needed_by[name] & names}:
        names |= found
    return (name + pin.rstrip() for name, pin in pins.items() if name in names)


def fits(file: str) -> bool:
    """Whether an image can install a file: a source distribution, or a wheel of its Python and platform."""
    if not file.endswith(".whl"):
        return True
    pythons, abis, platforms = (tags.split(".") for tags in file.removesuffix(".whl").split("-")[-3:])
    minors = {int(found[1]) for python in pythons if (found := re.fullmatch(r"cp3(\d+)", python))}
    stable = "abi3" in abis and any(minor <= max(MINORS) for minor in minors)
    exact = any(f"cp3{minor}" in abis or "none" in abis for minor in minors.intersection(MINORS))
    pure = "py3" in pythons and "none" in abis
    return (stable or exact or pure) and any(map(PLATFORM.fullmatch, platforms))


def shorten(lock: Path) -> None:
    """Rewrites constraints.txt. A lock names no files of older Pythons, so a hash that it lacks goes, too.

    A package that no image can install, for example one for Windows, keeps its hashes: a pin must have one.
    """
    packages = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
    files = [file for package in packages for file in (*package.get("wheels", ()), package.get("sdist")) if file]
    hashes = {file["hashes"]["sha256"] for file in files if fits(file["url"].rpartition("/")[2])}

    def kept(found: re.Match[str]) -> str:
        names = re.findall(r"[0-9a-f]{64}", found[0])
        names = [name for name in names if name in hashes] or names
        return " \\\n".join(f"    --hash=sha256:{name}" for name in names) + "\n"

    text = CONSTRAINTS.read_text(encoding="utf-8")
    CONSTRAINTS.write_text(re.sub(r"(?: +--hash=.*\n)+", kept, text), encoding="utf-8")


if sys.argv[1:2] == ["--shorten"]:
    shorten(Path(sys.argv[2]))
    sys.exit()
asked = [name for name in sys.argv[1:] if name != "--pinned"]
if asked and asked[0] in GROUPS:
    found = GROUPS[asked[0]]
else:
    found = [*PROJECT["dependencies"], *(line for name in asked for line in extra(name))]
if "--pinned" in sys.argv:
    found = pinned(found)
print(*found, sep="\n")
