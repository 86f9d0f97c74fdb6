"""The radix tree over token sequences: what is cached. Pure Python; can be lifted out and used alone."""

from radix.events import Event, EventLog, Removed, Stored
from radix.node import Node
from radix.policy import POLICIES, Policy, make_policy
from radix.tree import Match, RadixTree

__all__ = [
    "POLICIES",
    "Event",
    "EventLog",
    "Match",
    "Node",
    "Policy",
    "RadixTree",
    "Removed",
    "Stored",
    "make_policy",
]
