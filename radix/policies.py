"""The eviction policies by name."""

from collections.abc import Callable
from typing import Literal, get_args

from radix.eviction import LRU, Policy

PolicyName = Literal["foresight", "lru"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def _foresight(capacity: int) -> Policy:
    # Imported late: numpy takes longer to import than the rest of this package, and some commands need no tree.
    from radix.foresight import Foresight

    return Foresight(capacity)


# To add a policy, write its class, and add its name above and its maker here. A maker gets the pool's size in pages.
_MAKERS: dict[PolicyName, Callable[[int], Policy]] = {
    "foresight": _foresight,
    "lru": lambda _: LRU(),
}


def make_policy(name: PolicyName, capacity: int) -> Policy:
    """A policy by its name, for a pool of `capacity` pages."""
    return _MAKERS[name](capacity)
