"""The radix tree over token sequences: what is cached. Pure Python; can be lifted out and used alone."""

from radix.events import Event, EventLog, Removed, Stored
from radix.hold import Hold
from radix.namespace import Namespace
from radix.node import Node
from radix.outline import Block, outline
from radix.policy import POLICIES, Policy, make_policy
from radix.quotas import Quotas
from radix.shallow import ShallowMeta
from radix.stats import Stats
from radix.tree import Match, RadixTree, path
from radix.view import NodeView, view

__all__ = [
    "POLICIES",
    "Block",
    "Event",
    "EventLog",
    "Hold",
    "Match",
    "Namespace",
    "Node",
    "NodeView",
    "Policy",
    "Quotas",
    "RadixTree",
    "Removed",
    "ShallowMeta",
    "Stats",
    "Stored",
    "make_policy",
    "outline",
    "path",
    "view",
]
