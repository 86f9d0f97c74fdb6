"""Unknown request fields: a typing error is refused, any other is left out and named in the answer.

A name is a typing error if it is near a known name of the same body and no other server knows it. One rule holds for
requests and for all that is in them: messages, items, blocks, tools.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import lru_cache
from math import ceil
from typing import Any

from runtime.errors import InvalidRequest
from server.http.fields import EMPTY, PEERS

# Most names of one request, and most characters of a name in the answer.
MOST, MOST_CHARACTERS = 32, 100
_MOST_COMPARED = 256
_NEAR = 0.8

_names: ContextVar[dict[str, None] | None] = ContextVar("unknown fields", default=None)


@contextmanager
def collected() -> Iterator[dict[str, None]]:
    """Collects the names of the fields that are left out within the context."""
    found: dict[str, None] = {}
    token = _names.set(found)
    try:
        yield found
    finally:
        _names.reset(token)


def leave_out(name: str) -> bool:
    """Note a field that is left out; False if no answer can name it. Raises InvalidRequest for too many names."""
    if (found := _names.get()) is None:
        return False
    found[shown(name)] = None
    if len(found) > MOST:
        raise InvalidRequest(f"there are more than {MOST} unknown fields")
    return True


def shown(name: str) -> str:
    """A client's name as an answer can have it: short, and Unicode."""
    return name[:MOST_CHARACTERS].encode(errors="replace").decode()


def leave_out_unknown(name: str, value: Any) -> bool:
    """As `leave_out`. A field of another server whose value asks for nothing is not named."""
    return (_names.get() is not None and name in PEERS and value in EMPTY) or leave_out(name)


def meant(name: str, known: frozenset[str]) -> str | None:
    """The known name for which `name` is a typing error; None if there is none."""
    return None if name in PEERS else _meant(name[:_MOST_COMPARED], known)


@lru_cache(maxsize=1 << 12)  # of short names: clients choose them
def _meant(name: str, known: frozenset[str]) -> str | None:
    given, plain = _plain(name), _by_length(known)
    same = plain.get(len(given), {})
    if swapped := [one for one in same if {*one} == {*given} and sorted(one) == sorted(given)]:
        return same[swapped[0]]
    # Names of other lengths share too few letters.
    lengths = range(ceil(len(given) * _NEAR / (2 - _NEAR)), int(len(given) * (2 - _NEAR) / _NEAR) + 1)
    names = {one: own for length in lengths if length in plain for one, own in plain[length].items()}
    near = get_close_matches(given, names, 1, _NEAR)
    return names[near[0]] if near else None


@lru_cache(maxsize=1 << 7)
def _by_length(known: frozenset[str]) -> dict[int, dict[str, str]]:
    """By length, the known names by the form in which names are compared."""
    found: dict[int, dict[str, str]] = {}
    for one in known:
        found.setdefault(len(_plain(one)), {})[_plain(one)] = one
    return found


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
