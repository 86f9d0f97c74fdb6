"""The eviction policies by name."""

from collections.abc import Callable
from typing import Literal, get_args

from radix.eviction import GDSF, LRU, Policy

PolicyName = Literal["foresight", "lru", "gdsf"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def _foresight(capacity: int) -> Policy:
    # Its numpy takes longer to import than all else of this package, and commands without a tree do without it.
    from radix.foresight import Foresight

    return Foresight(capacity)


# A new policy is a class, its name above and a line here, which gets the pool's pages.
_MAKERS: dict[PolicyName, Callable[[int], Policy]] = {
    "foresight": _foresight,
    "lru": lambda _: LRU(),
    "gdsf": lambda _: GDSF(),
}


def make_policy(name: PolicyName, capacity: int) -> Policy:
    """A policy by its name, for a pool of `capacity` pages."""
    return _MAKERS[name](capacity)
