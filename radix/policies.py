"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from radix.eviction import GDSF, LRU, Policy
from radix.foresight import Foresight

PolicyName = Literal["foresight", "lru", "gdsf"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

# A new policy is a class, its name above and a line here, which gets the pool's pages.
_MAKERS: dict[PolicyName, Callable[[int], Policy]] = {
    "foresight": Foresight,
    "lru": lambda _: LRU(),
    "gdsf": lambda _: GDSF(),
}


def make_policy(name: PolicyName, capacity: int) -> Policy:
    """A policy by its name, for a pool of `capacity` pages."""
    return _MAKERS[name](capacity)
